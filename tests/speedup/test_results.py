"""Test reading the results of other commands."""

import json

import pytest

from swiftlite.errors import UserError
from swiftlite.speedup.results import accepted_drafts, read_result
from tests.messages import mentions


def test_acceptance_is_read_by_channel(tmp_path):
    path = tmp_path / "evaluation.json"
    figures = {"all": {"acceptance_per_position": [0.5, 0.25]}, "code": {"acceptance_per_position": [1, 0]}}
    path.write_text(json.dumps({"model": {"vllm": figures}}))
    found = read_result(path, lambda content: accepted_drafts(content, "vllm"))
    assert found == {"all": [0.5, 0.25], "code": [1.0, 0.0]}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"model": null}',
        '{"model": {"vllm": []}}',
        '{"model": {"vllm": {"all": {"acceptance_per_position": ["a"]}}}}',
    ],
)
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "evaluation.json"
    path.write_text(content)
    with pytest.raises(UserError) as raised:
        read_result(path, lambda content: accepted_drafts(content, "vllm"))
    assert mentions(raised.value.problem, str(path))
    assert mentions(raised.value.hint, "delete")
