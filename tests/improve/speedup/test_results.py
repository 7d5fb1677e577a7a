"""Test reading the results of other commands."""

import json

import pytest

from swiftlite.base.errors import UserError
from swiftlite.improve.speedup.results import accepted_drafts, read_result, seconds_of_steps
from tests.messages import mentions


def test_acceptance_is_read_by_channel(tmp_path):
    path = tmp_path / "acceptance.json"
    channels = {"code": {"acceptance_per_position": [1, 0]}}
    after = {"generated": {"acceptance_per_position": [0.5, 0.25]}, "generated_by_channel": channels}
    path.write_text(json.dumps({"before": {"generated": {"acceptance_per_position": [0, 0]}}, "after": after}))
    assert read_result(path, lambda content: accepted_drafts(content, "before")) == {"all": [0.0, 0.0]}
    found = read_result(path, lambda content: accepted_drafts(content, "after"))
    assert found == {"all": [0.5, 0.25], "code": [1.0, 0.0]}


@pytest.mark.parametrize(("resumed_from", "seconds"), [(0, 90.5), (40, None)])
def test_seconds_of_the_steps_of_a_whole_run(resumed_from, seconds):
    assert seconds_of_steps({"resumed_from": resumed_from, "seconds": 90.5}) == seconds


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"after": null}',
        '{"after": {"generated": []}}',
        '{"after": {"generated": {"acceptance_per_position": ["a"]}}}',
    ],
)
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "acceptance.json"
    path.write_text(content)
    with pytest.raises(UserError) as raised:
        read_result(path, lambda content: accepted_drafts(content, "after"))
    assert mentions(raised.value.problem, str(path))
    assert mentions(raised.value.hint, "delete")
