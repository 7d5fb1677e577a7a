"""Test the times of the parts of a step."""

import json
import time
from dataclasses import replace

import pytest

from swiftlite.train import phases
from swiftlite.train import run as training
from swiftlite.train.metrics.step_clock import PARTS, StepClock
from tests.train.prepared import prepare
from tests.train.test_sft import train

SLEEP = 0.2


def times_of(run) -> list[dict[str, float]]:
    """Return the times of each step, without evaluations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = [{name.removeprefix("time/"): line[name] for name in line if name.startswith("time/")} for line in lines]
    return [times for times in names if times]


def test_parts_add_up_to_less_than_the_step(options, mesh):
    run = train(options(save_steps=2, eval_steps=2), mesh)
    times = times_of(run)
    assert len(times) == 4
    for each in times:
        assert all(each[part] > 0 for part in PARTS)
        assert sum(each[part] for part in PARTS) < each["step"]
    assert ["evaluation" in each for each in times] == [True, False, True, False]  # before step 1 and after step 2
    assert ["checkpoint" in each for each in times] == [False, False, True, False]
    totals = json.loads((run / "run_report.json").read_text())["times"]
    assert set(totals) == {*PARTS, "other", "checkpoint", "evaluation"}
    for part in PARTS:
        assert totals[part] == pytest.approx(sum(each[part] for each in times), abs=1e-3)  # rounded
    assert totals["checkpoint"] > sum(each.get("checkpoint", 0.0) for each in times)  # the last one has no entry


def test_what_sleeps_is_what_takes_time(options, mesh, monkeypatch):
    """Each part sleeps once per step, the passes once per micro-batch."""
    run = prepare(options(train_iters=2, save_steps=1), mesh)
    trainer = training.make_trainer(run, phases.restore(run))
    batches, optimizer_step = trainer.batches.get, trainer.optimizer.step

    def slow_batches(step: int):
        time.sleep(SLEEP)
        return batches(step)

    def slow_optimizer():
        time.sleep(2 * SLEEP)
        return optimizer_step()

    monkeypatch.setattr(trainer.optimizer, "step", slow_optimizer)
    model = trainer.model[0].module
    model.register_forward_hook(lambda *_: time.sleep(SLEEP))
    norm = next(parameter for name, parameter in model.named_parameters() if "final_layernorm" in name)
    norm.register_hook(lambda gradient: time.sleep(2 * SLEEP))
    assert trainer.checkpointer is not None
    save = trainer.checkpointer.save
    monkeypatch.setattr(
        trainer.checkpointer, "save", lambda *given, **named: (time.sleep(SLEEP), save(*given, **named))
    )
    replace(trainer, batches=replace(trainer.batches, get=slow_batches)).fit(0)
    num_micro_batches = 2
    for times in times_of(run.output_dir):
        slept = {"data": SLEEP, "forward": num_micro_batches * SLEEP, "optimizer": 2 * SLEEP}
        slept["backward"] = num_micro_batches * 2 * SLEEP
        assert {part: times[part] >= seconds for part, seconds in slept.items()} == dict.fromkeys(slept, True)
        assert times["step"] >= sum(slept.values())
    assert times["checkpoint"] >= SLEEP  # of the first checkpoint


def test_other_timers_of_megatron_measure_nothing():
    clock = StepClock()
    timer = clock._timer("forward-backward", log_level=1)
    timer.start(barrier=False)
    timer.stop()
    clock.finish_step(1.0)
    assert clock.times == {"step": 1.0, **dict.fromkeys(PARTS, 0.0)}
    assert clock.totals["other"] == 1.0


def test_the_config_has_timers_only_during_a_step(options, mesh):
    run = prepare(options(), mesh)
    trainer = training.make_trainer(run, phases.restore(run))
    assert run.train_state.chunks[0].config.timers is None
    trainer.step(1)
    assert run.train_state.chunks[0].config.timers is None
