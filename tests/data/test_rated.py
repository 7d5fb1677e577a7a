"""Rows with one answer that is good or bad: every format, what is refused by field, and mismatched answers."""

import numpy as np
import pytest

from swiftlite.data.conversation import RowError
from swiftlite.data.rated import mismatch, parse_rated
from swiftlite.data.sample import make_sample
from swiftlite.data.sources import find_rows, read_rows

ASKED, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWER], "label": True},
        {"query": "q", "response": "a", "label": True, "rejected_response": None},
        {"prompt": "q", "completion": "a", "label": True},
        {"prompt": [ASKED], "completion": [ANSWER], "label": True},
    ],
)
def test_every_format_is_the_same_answer(row):
    assert parse_rated(row).messages == [ASKED, ANSWER]
    assert parse_rated(row).desirable is True
    assert parse_rated({**row, "label": False}).desirable is False


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"query": "q", "response": "a"}, "label: is missing"),
        ({"query": "q", "response": "a", "label": 1}, "label: is '1', neither true nor false"),
        ({"query": "q", "response": "a", "label": "true"}, "label: is 'true', neither true nor false"),
        ({"query": "q", "response": "a", "label": True, "rejected_response": "b"}, "rejected_response: makes this row"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "chosen: makes this row a pair"),
        ({"prompt": "q", "completion": "", "label": True}, "completion: is missing"),
        ({"completion": "a", "label": True}, "prompt: is missing"),
        ({"prompt": "q", "completion": [ASKED], "label": True}, "wrong order: user follows user"),
        ([1], "row: is a list"),
    ],
)
def test_what_is_no_rated_answer_is_named(row, problem):
    with pytest.raises(RowError, match=problem):
        parse_rated(row)


def test_bad_rows_have_their_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "q", "response": "a", "label": true}\n{"query": "q", "response": "a", "label": 3}\n')
    rows = read_rows(find_rows(str(path)), kind="rated")
    assert [str(bad) for bad in rows.bad_rows] == [f"{path}:2: label: is '3', neither true nor false"]


def sample(question: list[int], answer: list[int]):
    return make_sample([*question, *answer], [0.0] * len(question) + [1.0] * len(answer))


def test_an_answer_stands_behind_another_question():
    samples = [sample([1], [10, 11]), sample([2, 3], [20]), sample([2, 3], [30, 31, 32])]
    found = [each.mismatched for each in mismatch(samples, max_length=4, strategy="right")]
    ids = [list(each.input_ids) for each in found if each]
    # The last one's neighbour has the same question, so it gets the answer of the first.
    assert ids == [[1, 30, 31, 32], [2, 3, 10, 11], [2, 3, 10, 11]]
    first = found[0]
    assert first is not None
    assert np.array_equal(first.labels, [-100, 30, 31, 32])
    (cut, *_) = mismatch(samples, max_length=3, strategy="left")
    assert cut.mismatched is not None
    assert list(cut.mismatched.input_ids) == [30, 31, 32]
