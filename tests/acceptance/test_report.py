"""Test acceptance.json: its content, what each function changes, and the rejection of other files."""

import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.acceptance.report import (
    MeasuredPrompts,
    add_engine_acceptance,
    add_run_acceptance,
    add_run_answers,
    describe,
    read_acceptance,
    read_answers,
    read_summary,
)
from swiftlite.base.errors import UserError
from tests.messages import mention_each

COUNTS = DraftCounts(drafts=4, drafted=8, accepted_per_position=(3, 1))
MEASURED = MeasuredPrompts(3, COUNTS)
BEFORE = """\
{
  "depths": 2,
  "before": {
    "teacher_forced": {
      "acceptance_per_depth": [
        0.5,
        0.25
      ]
    },
    "generated": {
      "prompts": 3,
      "drafts": 4,
      "drafted": 8,
      "accepted": 4,
      "acceptance_rate": 0.5,
      "acceptance_per_position": [
        0.75,
        0.25
      ],
      "mean_accepted_length": 2.0
    }
  }
}
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "acceptance.json"


def test_the_file_of_a_run(path):
    add_run_acceptance(path, "before", [0.5, 0.25], MEASURED)
    assert path.read_text() == BEFORE


def test_after_stands_beside_before_and_before_begins_anew(path):
    add_run_acceptance(path, "before", [0.5, 0.25], MEASURED)
    before = read_acceptance(path)
    add_run_acceptance(path, "after", [0.75, 0.5], MEASURED)
    both = read_acceptance(path)
    assert list(both) == ["depths", "before", "after"]
    assert both["before"] == before["before"]
    assert both["after"]["teacher_forced"] == {"acceptance_per_depth": [0.75, 0.5]}
    add_run_acceptance(path, "before", [0.5, 0.25], MEASURED)
    assert read_acceptance(path) == before


def test_a_run_that_has_no_figures_from_before_has_those_from_after(path):
    add_run_acceptance(path, "after", [0.5], MEASURED)
    assert list(read_acceptance(path)) == ["depths", "after"]


def test_engines_stand_beside_each_other_and_replace_their_own(path):
    add_run_acceptance(path, "after", [0.5, 0.25], MEASURED)
    of_the_run = read_acceptance(path)
    add_engine_acceptance(path, "vllm", 3, COUNTS)
    add_engine_acceptance(path, "sglang", 3, COUNTS)
    add_engine_acceptance(path, "vllm", 5, DraftCounts(1, 2, (1, 1)))
    add_engine_acceptance(path, "vllm", 4, COUNTS, temperature=0.7)
    content = read_acceptance(path)
    engines = content.pop("engines")
    assert content == of_the_run
    assert list(engines) == ["vllm", "sglang", "vllm_at_temperature_0.7"]
    assert mention_each([describe(name) for name in engines], ["vllm", "sglang", "vllm 0.7"])
    assert engines["vllm_at_temperature_0.7"]["prompts"] == 4
    assert engines["sglang"] == {"prompts": 3, **COUNTS.to_json()}
    assert engines["vllm"]["prompts"] == 5
    assert engines["vllm"]["acceptance_rate"] == 1.0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        ("no JSON", "Expecting value"),
        ("[]", ""),
        ('{"loss": 1}', ""),
    ],
)
def test_what_is_no_such_file_is_named_and_left_alone(path, content, problem):
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"{path.name} .*{problem}") as error:
        add_engine_acceptance(path, "vllm", 1, COUNTS)
    assert "--acceptance_json" in error.value.hint
    assert (path.read_text() if path.exists() else None) == content


def test_channels_have_figures_of_their_own(path):
    add_run_acceptance(path, "after", [0.5], MEASURED, {"tale": MEASURED, "sum": MEASURED})
    after = read_acceptance(path)["after"]
    assert list(after["generated_by_channel"]) == ["sum", "tale"]
    assert after["generated_by_channel"]["sum"] == after["generated"] == {"prompts": 3, **COUNTS.to_json()}


def test_the_summary_has_what_has_been_measured(path):
    add_run_acceptance(path, "before", [0.5, 0.25], MEASURED)
    assert read_summary(path) == {"acceptance_before": 0.5}
    add_run_acceptance(path, "after", [0.5, 0.25], MeasuredPrompts(3, DraftCounts(4, 8, (4, 2))))
    assert read_summary(path) == {"acceptance_before": 0.5, "acceptance_after": 0.75}


def test_answers_before_and_after_and_before_begins_anew(path):
    answer = {"prompt": "</script> \ud83d?", "channel": "", "tokens": [{"text": "a", "depth": 0}]}
    readable = answer | {"prompt": "</script> ??"}
    add_run_answers(path, "before", [answer])
    add_run_answers(path, "after", [answer, answer])
    assert read_answers(path.parent) == {"before": [readable], "after": [readable, readable]}
    add_run_answers(path, "before", [])
    assert read_answers(path.parent) == {"before": []}


@pytest.mark.parametrize("content", [None, "half of a fi", "[]"])
def test_answers_that_cannot_be_read_are_none(path, content):
    if content is not None:
        path.with_name("drafts.json").write_text(content)
    assert read_answers(path.parent) == {}
    add_run_answers(path, "after", [])
    assert read_answers(path.parent) == {"after": []}
