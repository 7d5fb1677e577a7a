"""Test which checkpoint is the best one, against transformers' Trainer, and that it is never deleted."""

import json
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from swiftlite.store.best import BEST_FILE, Evaluations, best_checkpoint, chosen_checkpoint
from swiftlite.store.retention import EPHEMERAL_FILE, delete_oldest


def names(run) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoint-*"))


@pytest.mark.parametrize("greater_is_better", [True, False])
@pytest.mark.parametrize("threshold", [0.0, 1.5])
def test_counts_equal_those_of_transformers(greater_is_better, threshold):
    """Values are small integers, so that some are equal and some changes equal the threshold plus a half."""
    generator = random.Random(0)
    for _ in range(50):
        callback = EarlyStoppingCallback(3, threshold)
        args: Any = SimpleNamespace(greater_is_better=greater_is_better)
        state, control = TrainerState(), TrainerControl()
        evaluations = Evaluations("eval_m", greater_is_better)
        for step in range(1, 12):
            value = float(generator.randint(0, 6))
            callback.check_metric_value(args, state, control, value)
            best = state.best_metric  # the order and the comparison of `Trainer._determine_best_metric`
            if best is None or (value > best if greater_is_better else value < best):
                state.best_metric, state.best_global_step = value, step
            evaluations = evaluations.having(step, value)
            assert evaluations.num_without_improvement(threshold) == callback.early_stopping_patience_counter
            assert evaluations.best_of(evaluations.values) == state.best_global_step


def test_a_value_that_is_not_finite_is_never_the_best(tmp_path):
    evaluations = Evaluations("eval_loss", greater_is_better=False)
    for step, value in enumerate((math.nan, -math.inf, 3.0, math.nan, math.inf), start=1):
        evaluations = evaluations.having(step, value)
    assert evaluations.best_of([1, 2]) is None
    assert evaluations.best_of(range(1, 6)) == 3
    assert evaluations.num_without_improvement(0.0) == 2
    evaluations.write(tmp_path)
    assert Evaluations.read(tmp_path) == evaluations
    assert json.loads((tmp_path / BEST_FILE).read_text())["best_metric"] == 3.0


def test_the_best_checkpoint_is_kept(tmp_path):
    """Among the existing ones: step 30 is better, but was not saved."""
    for step in (10, 20, 40, 50, 60):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-20" / EPHEMERAL_FILE).touch()
    evaluations = Evaluations("eval_loss", False, is_chosen=True)
    for step, value in {10: 3.0, 20: 2.0, 30: 1.0, 40: 2.0, 50: 2.5, 60: 2.5}.items():
        evaluations = evaluations.having(step, value)
    evaluations.write(tmp_path)
    delete_oldest(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-20", "checkpoint-60"]
    assert best_checkpoint(tmp_path) == chosen_checkpoint(tmp_path) == tmp_path / "checkpoint-20"


@pytest.mark.parametrize("content", ["", "[]", '{"evaluations": 1}', '{"evaluations": [{"step": "x", "value": 1}]}'])
def test_a_damaged_file_is_ignored(tmp_path, caplog, content):
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / BEST_FILE).write_text(content)
    assert chosen_checkpoint(tmp_path) == tmp_path / "checkpoint-5"
    assert BEST_FILE in caplog.text


def test_without_the_option_the_newest_is_chosen(tmp_path):
    assert chosen_checkpoint(tmp_path) is None
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    Evaluations("eval_loss", False).having(5, 1.0).having(10, 2.0).write(tmp_path)
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoint-5"
    assert chosen_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
