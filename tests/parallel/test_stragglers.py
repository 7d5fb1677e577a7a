"""Test the comparison of ranks: which rank is slow, and when it is reported."""

import json
import logging
import time

import pytest

from swiftlite.args.commands import SftArgs
from swiftlite.base.log import logger
from swiftlite.train import run as training
from swiftlite.train.metrics import stragglers
from swiftlite.train.metrics.stragglers import NUM_ENTRIES, Stragglers
from swiftlite.train.trainer import Trainer
from tests.messages import mention_each
from tests.parallel.launch import launch
from tests.tiny import make_tiny_hf

SLEEP = 1.0
STEPS = 3
"""Number of slow steps, after a first step in which both ranks import and allocate."""


def reported(work: list[list[float]], stages: list[int]) -> list[tuple[int, int]]:
    """Return (entry, rank) for each report; `work` has the work of all ranks for each entry, counted from 1."""
    ranks = Stragglers(mesh=None)  # pyright: ignore[reportArgumentType]: only `compare` communicates
    return [(entry, rank) for entry, now in enumerate(work, 1) for rank, _ in ranks.slow_ranks(now, stages)]


def test_a_rank_is_reported_once_when_it_has_been_slow_for_long():
    slow, even = [1.0, 1.3, 1.0], [1.0, 1.1, 1.0]
    assert reported([slow] * (3 * NUM_ENTRIES), [0, 0, 0]) == [(NUM_ENTRIES, 1)]
    assert reported([slow] * (NUM_ENTRIES - 1) + [even] + [slow] * (NUM_ENTRIES - 1), [0, 0, 0]) == []
    again = [slow] * NUM_ENTRIES + [even] + [slow] * NUM_ENTRIES
    assert reported(again, [0, 0, 0]) == [(NUM_ENTRIES, 1), (2 * NUM_ENTRIES + 1, 1)]


def test_different_ranks_that_are_slow_in_turn_are_not_reported():
    assert reported([[1.0, 2.0, 1.0], [1.0, 1.0, 2.0]] * NUM_ENTRIES, [0, 0, 0]) == []


def test_stages_are_not_compared():
    assert reported([[1.0, 5.0]] * NUM_ENTRIES, [0, 1]) == []
    assert reported([[1.0, 1.0, 5.0, 7.0]] * NUM_ENTRIES, [0, 0, 1, 1]) == [(NUM_ENTRIES, 3)]


def test_a_slow_group_is_reported_rank_by_rank():
    """Two tensor-parallel ranks that wait for each other, and two others."""
    assert reported([[1.0, 1.0, 2.0, 2.0]] * NUM_ENTRIES, [0] * 4) == [(NUM_ENTRIES, 2), (NUM_ENTRIES, 3)]


def train_with_a_slow_rank(args: SftArgs) -> tuple[int, list[str]]:
    """Train while rank 1 sleeps in each forward pass after the first step; return the exit code and the warnings."""
    take_step = Trainer.step

    def slow(self: Trainer, step: int) -> dict[str, float]:
        if self.mesh.dp.rank() == 1 and step == 2:
            self.model[0].module.register_forward_hook(lambda *_: time.sleep(SLEEP))
        return take_step(self, step)

    Trainer.step = slow  # this process ends with the run
    stragglers.NUM_ENTRIES = STEPS
    warnings = Warnings()
    logger.addHandler(warnings)
    return training.run(args), warnings.texts


class Warnings(logging.Handler):
    """Lists the warnings of a process."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.gloo
def test_a_slow_rank_is_named_and_profiled(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": f"{n}?", "response": f"{n}."}) + "\n" for n in range(8)))
    args = SftArgs(
        model=str(make_tiny_hf(tmp_path / "hf", "qwen3", depth=1, with_tokenizer=True)),
        dataset=[str(rows)],
        output_dir=str(tmp_path / "run"),
        torch_dtype="float32",
        split_dataset_ratio=0.0,
        micro_batch_size=1,
        global_batch_size=2,
        train_iters=STEPS + 1,
        report_to=[],
        profile_steps=[2, 2],
        profile_ranks=[1],
    )
    (code, warned), (other_code, also_warned) = launch(2, train_with_a_slow_rank, args)
    assert (code, other_code) == (0, 0)
    _, *lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["time/slowest_rank"], line["time/fastest_rank"]) for line in lines] == [(1, 0)] * STEPS
    assert all(line["time/slowest"] >= SLEEP for line in lines)
    assert all(line["time/step"] >= SLEEP for line in lines)  # the first rank waited for the other
    assert mention_each(warned, ["rank 1 --profile_ranks"])
    assert also_warned == []
    assert {path.name for path in (tmp_path / "run" / "profile").iterdir()} == {
        "steps-2-2-rank-1.trace.json.gz",
        "steps-2-2-rank-1.operators.json",
    }
