"""Test how config.json stores the tokens that heads can draft."""

import pytest

from swiftlite.base import draft_vocab
from swiftlite.base.errors import UserError


@pytest.mark.parametrize(
    ("ids", "text"),
    [((), ""), ((7,), "7"), ((0, 1, 2, 5, 8, 9), "0-2 5 8-9"), ((3, 4), "3-4"), (tuple(range(99)), "0-98")],
)
def test_ids_as_text(ids, text):
    assert draft_vocab.to_text(ids) == text
    if ids:
        assert draft_vocab.from_text(text, 99) == ids


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "1-",
        "-1",
        "1-2-3",
        "3 2",
        "2 2",
        "5-3",
        "4 4-6",
        "1.5",
        "²",
        " ",
        ["1"],
        7.5,
        "99",
        "0-99",
        "0-999999999999",
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(UserError, match="mtp_draft_vocab"):
        draft_vocab.from_text(text, 99)
