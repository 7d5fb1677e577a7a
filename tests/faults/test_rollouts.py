"""Test runs of `megatron grpo` that are killed or stopped at a function, and continued with --resume.

`hunt.py grpo` does the same at each operation on files.
"""

import signal
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.hunt import COMMANDS, run, write_files
from tests.forked import SignalAtCall
from tests.messages import mentions
from tests.tiers import some_of

GRPO = COMMANDS["grpo"]
PLACES = [
    ("load_scored_prompts", 1),
    ("LiveWeights.send", 1),  # for the evaluation before the first step
    ("LiveWeights.send", 2),
    ("LiveWeights.send", 3),
    ("load_heads", 4),  # the engine has the new trunk, and the heads of before
    ("Drawing.draw", 2),
    ("TransformersEngine._complete", 3),
    ("TransformersEngine._complete", 12),  # of the second generation
    ("Drawing.score", 3),
    ("RewardProcess._call", 2),
    ("compute_advantages", 3),
    ("HeldOutPrompts.draw", 1),
    ("HeldOutPrompts.draw", 2),  # before the first checkpoint
    ("HeldOutPrompts.draw", 3),  # after the last one
    ("token_log_probabilities", 1),
    ("token_log_probabilities", 2),
    ("write_generation", 1),
    ("write_generation", 2),
    ("Generation.save", 1),  # the file for readers is written, the other is not
    ("Generation.save", 2),
    ("PolicyObjective._policy_loss", 2),  # between two micro-batches
    ("Trainer.log", 2),
    ("Checkpointer.save", 1),
    ("Checkpointer.finish", 1),
    ("Checkpointer.save", 2),
    ("write_report", 1),
]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> dict[str, str]:
    return write_files(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def unbroken(words, tmp_path_factory) -> dict[str, Any]:
    """Return the content of a run that is not stopped."""
    out = tmp_path_factory.mktemp("unbroken")
    code, errors, _ = run(GRPO, words, out)
    assert code == 0, errors
    content: Any = GRPO.content(out)
    return content


@pytest.mark.parametrize(
    ("function", "number"),
    some_of(
        PLACES,
        ("Generation.save", 2),
    ),
)
def test_a_killed_run_continues_as_if_it_was_not(words, unbroken, function, number, tmp_path):
    code, errors, _ = run(GRPO, words, tmp_path, signal_at=SignalAtCall(function, number))
    assert code == -signal.SIGKILL, errors
    code, errors, _ = run(GRPO, words, tmp_path, is_again=True)
    assert code == 0, errors
    assert GRPO.content(tmp_path) == unbroken


@pytest.mark.parametrize(
    ("function", "number"),
    some_of(
        [
            ("Drawing.draw", 3),
            ("write_generation", 2),
            ("Trainer.log", 2),
            ("Checkpointer.save", 1),
            ("Checkpointer.save", 2),
        ],
        ("Checkpointer.save", 2),
    ),
)
def test_a_killed_run_that_draws_ahead_continues_as_if_it_was_not(words, function, number, tmp_path):
    command = COMMANDS["grpo_async"]
    for name in ("unbroken", "killed"):
        (tmp_path / name).mkdir()
    code, errors, _ = run(command, words, tmp_path / "unbroken")
    assert code == 0, errors
    code, errors, _ = run(command, words, tmp_path / "killed", signal_at=SignalAtCall(function, number))
    assert code == -signal.SIGKILL, errors
    code, errors, _ = run(command, words, tmp_path / "killed", is_again=True)
    assert code == 0, errors
    assert command.content(tmp_path / "killed") == command.content(tmp_path / "unbroken")


@pytest.mark.parametrize("number", some_of([7, 15], 15))
def test_a_run_that_is_killed_between_two_turns_draws_the_generation_again(words, number, tmp_path):
    """The first turns are not stored. Their random numbers are the same again."""
    command = COMMANDS["grpo_talk"]
    for name in ("unbroken", "killed"):
        (tmp_path / name).mkdir()
    code, errors, _ = run(command, words, tmp_path / "unbroken")
    assert code == 0, errors
    code, errors, _ = run(command, words, tmp_path / "killed", signal_at=SignalAtCall("Turns.after", number))
    assert code == -signal.SIGKILL, errors
    assert len(list(tmp_path.glob("killed/run/rollouts/*.safetensors"))) == (number == 15)
    code, errors, _ = run(command, words, tmp_path / "killed", is_again=True)
    assert code == 0, errors
    found: Any = command.content(tmp_path / "killed")
    assert found == command.content(tmp_path / "unbroken")
    masks = [each["is_generated"] for each in found["rollouts"].values()]
    assert all("False" in mask and "True" in mask for mask in masks)


@pytest.mark.parametrize(
    ("function", "number", "checkpoints"),
    some_of(
        [
            ("TransformersEngine._complete", 4, ()),  # before the first step
            ("TransformersEngine._complete", 12, ("checkpoint-2",)),
            ("RewardProcess._call", 3, ("checkpoint-2",)),
        ]
    ),
)
def test_a_signal_ends_a_generation(words, unbroken, function, number, checkpoints, tmp_path):
    """The last step is saved. The generation is not stored, because it is not complete."""
    at = SignalAtCall(function, number, signal.SIGTERM)
    code, errors, _ = run(GRPO, words, tmp_path, signal_at=at)
    assert code == 128 + signal.SIGTERM, errors
    assert any(mentions(line, "15 --resume") for line in errors.splitlines()), errors
    assert sorted(path.name for path in tmp_path.glob("run/checkpoint-*")) == [*checkpoints]
    assert len(list(tmp_path.glob("run/rollouts/*.safetensors"))) == len(checkpoints)
    code, errors, _ = run(GRPO, words, tmp_path, is_again=True)
    assert code == 0, errors
    found: Any = GRPO.content(tmp_path)
    for name, content in unbroken.items():
        if name not in ("checkpoints", "names"):
            assert found[name] == content
    for name, digest in unbroken["checkpoints"].items():
        if name in found["checkpoints"]:
            assert found["checkpoints"][name] == digest


def test_a_signal_ends_an_evaluation(words, unbroken, tmp_path):
    """Its step is saved, and the resumed run repeats the evaluation."""
    at = SignalAtCall("HeldOutPrompts.draw", 2, signal.SIGTERM)
    code, errors, _ = run(GRPO, words, tmp_path, signal_at=at)
    assert code == 128 + signal.SIGTERM, errors
    assert [path.name for path in tmp_path.glob("run/checkpoint-*")] == ["checkpoint-3"]
    code, errors, _ = run(GRPO, words, tmp_path, is_again=True)
    assert code == 0, errors
    assert GRPO.content(tmp_path) == unbroken


@pytest.mark.gloo
def test_a_signal_at_the_first_rank_ends_all_ranks(words, tmp_path):
    """The other rank waits for the generation. Both save the last step."""
    at = SignalAtCall("TransformersEngine._complete", 12, signal.SIGTERM)
    code, errors, _ = run(replace(GRPO, processes=2), words, tmp_path, signal_at=at)
    assert code == 128 + signal.SIGTERM, errors
    assert [path.name for path in tmp_path.glob("run/checkpoint-*")] == ["checkpoint-2"]
