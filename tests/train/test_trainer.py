"""Test the trainer: when it logs, saves, evaluates and stops, and what it leaves unchanged."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from swiftlite.base.errors import UserError
from swiftlite.model import forward
from swiftlite.store.retention import is_ephemeral
from swiftlite.train import phases
from swiftlite.train import run as training
from swiftlite.train.stopping import Stopped
from swiftlite.train.trainer import Trainer, seed_of_step
from tests.messages import mentions, naming
from tests.tiers import some_of
from tests.train.prepared import prepare
from tests.train.test_sft import metrics, train


class Listed:
    """A metric logger that stores what it receives."""

    def __init__(self):
        self.lines: list[tuple[int, set[str]]] = []

    def log(self, step, metrics) -> None:
        self.lines.append((step, set(metrics)))

    def close(self) -> None:
        self.lines.append((0, {"closed"}))


@pytest.fixture
def make_trainer(options, mesh):
    """Return the trainer of a run that has not started."""

    def make(after_step=None, **changed) -> Trainer:
        run = prepare(options(**changed), mesh)
        trainer = training.make_trainer(run, phases.restore(run))
        return replace(trainer, metric_loggers=[Listed()], after_step=after_step)

    return make


def checkpoints(trainer: Trainer) -> set[str]:
    assert trainer.checkpointer is not None
    return {path.name for path in trainer.checkpointer.output_dir.glob("checkpoint-*")}


def test_when_a_run_logs_saves_and_evaluates(make_trainer):
    steps = []
    trainer = make_trainer(steps.append, train_iters=7, logging_steps=2, save_steps=3, eval_steps=4)
    assert trainer.fit(0) == 0
    trainer.close()
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert checkpoints(trainer) == {"checkpoint-3", "checkpoint-6", "checkpoint-7"}
    *lines, last = trainer.metric_loggers[0].lines
    trained = [step for step, names in lines if "grad_norm" in names]
    evaluated = [step for step, names in lines if "eval_loss" in names]
    assert (trained, evaluated) == ([2, 4, 6, 7], [4])  # the last step always; its evaluation is the caller's
    assert last == (0, {"closed"})


def test_an_ephemeral_checkpoint_is_deleted_when_there_is_a_newer_one(make_trainer):
    found = []

    def after_step(step: int) -> None:
        found.append(sorted(int(name.removeprefix("checkpoint-")) for name in checkpoints(trainer)))

    limits: dict[str, int] = {"save_steps": 4, "ephemeral_save_steps": 1, "save_total_limit": 2}
    trainer = make_trainer(after_step, train_iters=10, **limits)
    assert trainer.fit(0) == 0
    # After step N, before its checkpoint: the kept ones, and the ephemeral one of step N - 1.
    assert found == [[], [1], [2], [3], [4], [4, 5], [4, 6], [4, 7], [4, 8], [4, 8, 9]]
    assert checkpoints(trainer) == {"checkpoint-8", "checkpoint-10"}


def test_a_run_resumes_from_an_ephemeral_checkpoint(options, mesh, tmp_path):
    """It also continues to count tokens and samples."""
    usual = {"train_iters": 6, "save_steps": 4, "ephemeral_save_steps": 3}
    unbroken = train(options(output_dir=str(tmp_path / "unbroken"), **usual), mesh)
    args = options(output_dir=str(tmp_path / "stopped"), **usual)
    run = prepare(args, mesh)
    trainer = training.make_trainer(run, phases.restore(run))

    def fail(step: int) -> None:
        if step == 4:
            raise ZeroDivisionError

    trainer.after_step = fail
    with pytest.raises(ZeroDivisionError):
        trainer.fit(0)
    assert checkpoints(trainer) == {"checkpoint-3"}
    stopped = train(replace(args, resume=True), mesh)
    assert metrics(stopped) == metrics(unbroken)
    assert {path.name for path in stopped.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    *_, last = [line for line in metrics(stopped) if "grad_norm" in line]
    assert last["total_samples"] == 6 * args.global_batch_size
    rows = [len(sample) for sample in run.data.train]
    assert last["total_tokens"] > 6 * args.global_batch_size * min(rows)
    report = json.loads((stopped / "run_report.json").read_text())
    assert (report["total_tokens"], report["total_samples"]) == (last["total_tokens"], last["total_samples"])


def test_a_stop_before_a_step_does_not_save_twice(make_trainer):
    """A signal in `TrainBatches.get`, which is after the checkpoint of the step before."""
    trainer = make_trainer(train_iters=6, save_steps=4, ephemeral_save_steps=3)
    read = trainer.batches.get

    def stop(step: int):
        if step == 3:
            raise Stopped
        return read(step)

    trainer.batches = replace(trainer.batches, get=stop)
    assert trainer.checkpointer is not None
    trainer.fit(0)
    assert checkpoints(trainer) == {"checkpoint-3"}
    assert is_ephemeral(trainer.checkpointer.output_dir / "checkpoint-3")


def test_what_is_said_of_a_step_is_said_before_it_is_saved(make_trainer):
    """If the run were killed between the save and the log, the resumed run would lack the metrics of this step."""
    trainer = make_trainer(train_iters=4, logging_steps=1, save_steps=2, eval_steps=2)
    seen = []

    class Watching(Listed):
        def log(self, step, metrics) -> None:
            seen.append((step, "checkpoint-2" in checkpoints(trainer)))

    replace(trainer, metric_loggers=[Watching()]).fit(0)
    assert seen == [(1, False), (2, False), (2, False), (3, True), (4, True)]


def test_a_run_goes_on_after_the_step_that_it_is_given(make_trainer):
    steps = []
    make_trainer(steps.append).fit(2)
    assert steps == [3, 4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(make_trainer, number):
    steps = []

    def after_step(step: int) -> None:
        steps.append(step)
        if step == 2:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    trainer = make_trainer(after_step)
    assert trainer.fit(0) == number
    assert steps == [1, 2]
    assert checkpoints(trainer) == {"checkpoint-2"}
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_twice_ends_the_run_once(make_trainer, number):
    def after_step(step: int) -> None:
        signal.raise_signal(number)
        signal.raise_signal(number)

    before = signal.signal(number, signal.SIG_DFL)  # SIGHUP is ignored under nohup
    try:
        trainer = make_trainer(after_step)
        assert trainer.fit(0) == number
        assert checkpoints(trainer) == {"checkpoint-1"}
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_the_second_ctrl_c_ends_the_process_at_once(make_trainer):
    def after_step(step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job of a shell
    try:
        with pytest.raises(KeyboardInterrupt):
            make_trainer(after_step).fit(0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_evaluating_leaves_the_model_as_it_was(make_trainer):
    trainer = make_trainer()
    before = [parameter.clone() for chunk in trainer.model for parameter in chunk.parameters()]
    first, second = trainer.evaluate(0), trainer.evaluate(0)
    assert first == second
    assert all(chunk.training for chunk in trainer.model)
    after = [parameter for chunk in trainer.model for parameter in chunk.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert all(name.startswith("eval_") for name in first)


@pytest.mark.parametrize("arrives", some_of(["before", "within"], "within"))
def test_an_evaluation_that_a_signal_ended_is_repeated(options, mesh, tmp_path, monkeypatch, arrives):
    """All metrics are those of an unbroken run, and no further group of micro-batches is evaluated."""
    monkeypatch.setattr(forward, "GROUP_PER_STAGE", 1)
    usual = {"eval_steps": 2, "save_steps": 3, "train_iters": 6, "micro_batch_size": 1, "split_dataset_ratio": 0.4}
    unbroken = train(options(output_dir=str(tmp_path / "unbroken"), **usual), mesh)
    args = options(output_dir=str(tmp_path / "stopped"), **usual)
    for expected in (0, 1):  # the evaluation after step 4, then its repetition
        run = prepare(args, mesh)
        state = phases.restore(run)
        trainer = training.make_trainer(run, state)
        groups = interrupt(trainer, run, state.step, in_evaluation=arrives == "within")
        outcome = phases.fit(run, trainer, state.step, training.make_held_out(run))
        assert outcome.stopped_by == signal.SIGTERM
        assert checkpoints(trainer) == {"checkpoint-3", "checkpoint-4"}
        assert groups() <= 2
        args = replace(args, resume=True)
        if arrives == "before" and expected == 0:
            break
    assert metrics(train(args, mesh)) == metrics(unbroken)


def interrupt(trainer: Trainer, run: phases.Run, first: int, *, in_evaluation: bool) -> Callable[[], int]:
    """Send SIGTERM after step 4 or in the evaluation that follows it.

    Returns:
        A function that returns the number of micro-batches of this evaluation that were computed.
    """
    seen: list[int] = []
    reached: list[int] = [first]
    trainer.after_step = lambda step: (
        reached.append(step) or (signal.raise_signal(signal.SIGTERM) if step == 4 and not in_evaluation else None)
    )

    def see(model, args) -> None:
        if reached[-1] == 4 and not torch.is_grad_enabled():
            seen.append(1)
            if in_evaluation and len(seen) == 2:
                signal.raise_signal(signal.SIGTERM)

    run.train_state.chunks[0].register_forward_pre_hook(see)
    return lambda: len(seen)


def test_a_checkpoint_after_an_evaluation_repeats_none(options, mesh):
    args = options(eval_steps=2, save_steps=2, train_iters=4)
    train(args, mesh)
    run = prepare(replace(args, resume=True, train_iters=8), mesh)
    assert training.make_trainer(run, phases.restore(run)).lacks_evaluation is False


def test_what_fails_while_evaluating_leaves_the_model_training(make_trainer):
    trainer = make_trainer()

    def fail() -> None:
        with trainer.evaluating():
            assert not any(chunk.training for chunk in trainer.model)
            assert not torch.is_grad_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(chunk.training for chunk in trainer.model)
    assert torch.is_grad_enabled()


def test_nothing_held_out_is_no_evaluation(make_trainer):
    trainer = make_trainer(split_dataset_ratio=0.0)
    assert trainer.evaluate(0) == {}
    trainer.log(1, {})
    assert trainer.metric_loggers[0].lines == []


def test_a_loss_that_is_no_number_ends_the_run(make_trainer):
    """The run ends before it writes a checkpoint, so that the previous checkpoint stays usable."""
    trainer = make_trainer()
    with torch.no_grad():
        next(trainer.model[0].parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match=naming("1 loss nan")) as error:
        trainer.fit(0)
    assert error.value.hint is not None
    assert mentions(error.value.hint, "--lr --mtp_loss_scaling_factor")
    assert checkpoints(trainer) == set()


def test_metrics_of_a_step(make_trainer):
    trainer = make_trainer(lr=1e-2, lr_warmup_fraction=0.5)
    metrics = trainer.step(1)
    assert list(metrics)[:3] == ["loss", "mtp_1_loss", "mtp_1_acceptance"]
    assert metrics["learning_rate"] == pytest.approx(5e-3)  # half of the way up
    assert metrics["grad_norm"] > 0
    num_tokens = sum(batch.num_tokens for batch in trainer.batches.get(0))
    # Both are divided by the same seconds: operations per token.
    flops_per_token = 1e12 * metrics["tflops_per_second"] / metrics["tokens_per_second"]
    counts = trainer.objective.count_targets(trainer.batches.get(0)).tolist()
    squares = sum(length**2 for batch in trainer.batches.get(0) for length in batch.lengths)
    assert flops_per_token == pytest.approx(trainer.flops.step(num_tokens, squares, counts[0]) / num_tokens)
    json.dumps(metrics)  # what a sink needs


def test_flops_of_a_large_step_are_summed(make_trainer):
    assert make_trainer(train_iters=1)._sum_over_data_parallel(2**65, 7) == [2**65, 7]


def test_neighbors_draw_different_numbers():
    """Neighboring seeds and steps draw different numbers."""
    drawn = set()
    for seed in (42, 43):
        for step in (1, 2, 3):
            torch.manual_seed(seed_of_step(seed, step))
            drawn.add(float(torch.rand((), dtype=torch.float64)))
    assert len(drawn) == 6
