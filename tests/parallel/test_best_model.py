"""Test that two data-parallel ranks choose and load the best checkpoint as one process does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swiftlite.args.commands import SftArgs
from swiftlite.store.best import BEST_FILE
from tests.parallel.runs import run_all, start
from tests.tiny import make_tiny_hf
from tests.train.conftest import options_in
from tests.train.test_best_model import WORSENS

pytestmark = pytest.mark.gloo


def outcome(args: SftArgs) -> tuple[list[str], dict, dict]:
    """Return the checkpoints of a run, its evaluations, and the evaluation of the loaded weights."""
    run = Path(args.output_dir)
    best = json.loads((run / BEST_FILE).read_text())
    report = json.loads((run / "run_report.json").read_text())
    return sorted(path.name for path in run.glob("checkpoint-*")), best, report["evaluation"]


def test_two_ranks_load_the_best_checkpoint(tmp_path):
    hf_dir = make_tiny_hf(tmp_path / "hf", "qwen3", depth=1, with_tokenizer=True)
    alone = options_in(tmp_path, hf_dir)(output_dir=str(tmp_path / "alone"), **WORSENS)
    divided = replace(alone, output_dir=str(tmp_path / "DP2"))
    start(1, run_all, [alone], 1)
    start(2, run_all, [divided], 2)
    (expected, of_one, _), (found, of_two, evaluation) = outcome(alone), outcome(divided)
    assert found == expected == ["checkpoint-1", "checkpoint-3"]
    assert of_two["best_global_step"] == of_one["best_global_step"] == 1
    # Float32 sums in another order.
    assert of_two["best_metric"] == pytest.approx(of_one["best_metric"], rel=1e-5)
    assert evaluation["eval_loss"] == of_two["best_metric"]
    last = of_two["evaluations"][-1]
    assert last["step"] == 3
    assert last["value"] < of_two["best_metric"]
