"""Test runs with --metric_for_best_model: which checkpoint is the best, and when training ends."""

import json
import math
import signal
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from swiftlite.args.commands import DpoArgs
from swiftlite.args.fields import PreferenceLoss
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.plan.best_metric import known_metrics
from swiftlite.plan.preference import preference_of
from swiftlite.store.best import BEST_FILE
from swiftlite.train import phases
from swiftlite.train import run as training
from swiftlite.train.best_model import value_of
from swiftlite.train.checkpoint.checkpointer import resolve_checkpoint
from swiftlite.train.methods.kto import KtoObjective
from swiftlite.train.methods.preference import PreferenceObjective
from tests.messages import naming
from tests.tiers import some_of
from tests.train.prepared import prepare
from tests.train.test_sft import metrics, train

WORSENS: dict[str, Any] = {
    "train_iters": 6,
    "save_steps": 1,
    "eval_steps": 1,
    "save_total_limit": 1,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # the loss falls, so the first evaluation is the best one
    "load_best_model_at_end": True,
    "early_stopping_patience": 2,
}


class FailingLogger:
    """A metric logger that fails at the evaluation of step 3, after it was recorded and before it is saved."""

    def log(self, step, metrics) -> None:
        if step == 3 and "eval_loss" in metrics:
            raise ZeroDivisionError

    def summarize(self, figures) -> None:
        pass

    def close(self) -> None:
        pass


def interrupt(args, mesh, where: str) -> None:
    run = prepare(args, mesh)
    trainer = training.make_trainer(run, phases.restore(run))
    if where == "evaluation 3":
        trainer.metric_loggers = [*trainer.metric_loggers, FailingLogger()]

    def after_step(step: int) -> None:
        if where == f"signal {step}":
            signal.raise_signal(signal.SIGTERM)
        if where == f"step {step}":
            raise ZeroDivisionError

    trainer.after_step = after_step
    if where.startswith("signal"):
        assert trainer.fit(0) == signal.SIGTERM
        trainer.close()
    else:
        with pytest.raises(ZeroDivisionError):
            trainer.fit(0)


def state_of(run) -> tuple:
    report = json.loads((run / "run_report.json").read_text())
    checkpoints = sorted(path.name for path in run.glob("checkpoint-*"))
    return checkpoints, (run / BEST_FILE).read_text(), metrics(run), report["steps"], report["evaluation"]


@pytest.fixture
def unbroken(options, mesh, tmp_path):
    return train(options(output_dir=str(tmp_path / "unbroken"), **WORSENS), mesh)


def test_training_ends_early_with_the_best_weights(unbroken):
    checkpoints, content, lines, steps, evaluation = state_of(unbroken)
    values = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert steps == 3
    assert checkpoints == ["checkpoint-1", "checkpoint-3"]
    assert list(values) == [1, 2, 3]
    assert max(values, key=lambda step: values[step]) == 1
    assert evaluation["eval_loss"] == values[1]
    assert resolve_checkpoint(unbroken).name == "checkpoint-1"
    best = json.loads(content)
    assert (best["best_global_step"], best["best_metric"]) == (1, values[1])


@pytest.mark.parametrize("where", some_of(["step 2", "step 3", "signal 2", "evaluation 3"], "evaluation 3"))
def test_an_interrupted_run_decides_alike(options, mesh, tmp_path, unbroken, where):
    args = options(output_dir=str(tmp_path / "stopped"), **WORSENS)
    interrupt(args, mesh, where)
    resumed = replace(args, resume=True)
    assert state_of(train(resumed, mesh)) == state_of(unbroken)
    assert state_of(train(resumed, mesh)) == state_of(unbroken)  # nothing is left to do


def test_another_metric_on_resume_has_the_values_of_earlier_evaluations(options, mesh, unbroken):
    names = {"metric_for_best_model": "mtp_1_acceptance", "greater_is_better": None, "early_stopping_patience": None}
    train(options(**{**WORSENS, **names, "output_dir": str(unbroken), "train_iters": 4}, resume=True), mesh)
    found = json.loads((unbroken / BEST_FILE).read_text())
    values = {line["step"]: line["eval_mtp_1_acceptance"] for line in metrics(unbroken) if "eval_loss" in line}
    assert {each["step"]: each["value"] for each in found["evaluations"]} == values
    assert list(values) == [1, 2, 3, 4]


def test_a_metric_that_evaluations_lack_is_an_error_before_the_first_step(options, mesh):
    args = options(metric_for_best_model="reward")
    run = prepare(args, mesh)
    trainer = training.make_trainer(run, phases.restore(run))
    with pytest.raises(UserError, match=naming("--metric_for_best_model reward acceptance, loss, mtp_1_acceptance")):
        phases.fit(run, trainer, 0, training.make_held_out(run))
    assert not any(line["step"] for line in metrics(run.output_dir))
    assert dist.get_world_size() == 1


def test_rules_know_the_metrics_of_evaluations(options, mesh):
    run = prepare(options(), mesh)
    trainer = training.make_trainer(run, phases.restore(run))
    names = {name.removeprefix("eval_") for name in trainer.evaluate(0)}
    trainer.batches.release()
    assert {*known_metrics(run.args, run.plan.heads)} == names | {"acceptance"}
    for loss in get_args(PreferenceLoss):
        args = DpoArgs(loss_type=loss)
        make_objective = PreferenceObjective if loss != "kto" else KtoObjective
        objective = make_objective(Heads(1), 0.1, preference_of(args))
        found = objective.means(torch.zeros(objective.sums_shape, dtype=torch.float64))
        assert {*known_metrics(args, Heads(1))} == {*found, "acceptance"}


def test_acceptance_is_the_mean_over_the_heads():
    line = {"eval_loss": 1.0, "eval_mtp_1_acceptance": 0.5, "eval_mtp_2_acceptance": 0.25, "loss": 2.0}
    assert value_of("eval_acceptance", line) == 0.375
    assert value_of("eval_acceptance", {"eval_rollout/acceptance_1": 0.5, "eval_reward": 1.0}) == 0.5
    assert math.isnan(value_of("eval_loss", {"eval_loss": math.nan}))
    with pytest.raises(UserError, match=naming("--metric_for_best_model loss --val_dataset")):
        value_of("eval_loss", {"loss": 1.0})
