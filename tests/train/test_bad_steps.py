"""Test that bad steps leave no trace in the state of a run, and that a run goes on without them."""

import json
import re
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swiftlite import rules
from swiftlite.args.commands import DpoArgs, SftArgs
from swiftlite.base.errors import UserError
from swiftlite.report.metrics import decisions_in
from swiftlite.train import bad_steps, phases
from swiftlite.train import run as training
from swiftlite.train.bad_steps import BadSteps
from swiftlite.train.checkpoint.optimizer_state import slots_of
from swiftlite.train.trainer import Trainer
from tests.messages import naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.torchao_here import torchao as torchao
from tests.train.completions import make_teacher, policy_options, store
from tests.train.conftest import options_in
from tests.train.distilled import gkd_options
from tests.train.pairs import write_pairs
from tests.train.prepared import prepare
from tests.train.test_sft import metrics

NAN = float("nan")


def scale_gradients(trainer: Trainer, first: int, factors: Mapping[int, float]) -> None:
    """Multiply the gradients of some steps by a number, after they were summed over ranks.

    Args:
        first: the last step before the trainer's first one.
    """
    config: Any = trainer.model[0].config
    finalize, steps = config.finalize_model_grads_func, iter(range(first + 1, 1000))

    def finalize_and_scale(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        factor = factors.get(next(steps), 1.0)
        for parameter in trainer.model[0].parameters():
            if parameter.requires_grad and factor != 1:
                parameter.main_grad.mul_(factor)  # pyright: ignore[reportAttributeAccessIssue]

    for chunk in trainer.model:
        chunk.config.finalize_model_grads_func = finalize_and_scale


def run(
    args: SftArgs, mesh, factors: Mapping[int, float], change: Callable[[Trainer], Trainer] = lambda same: same
) -> Path:
    """Run all steps; the gradients of some steps are scaled."""
    run = prepare(args, mesh)
    state = phases.restore(run)
    trainer = change(training.make_trainer(run, state))
    scale_gradients(trainer, state.step, factors)
    outcome = phases.fit(run, trainer, state.step, training.make_held_out(run))
    if not outcome.stopped_by:
        phases.report(run, outcome)
    return run.output_dir


def files(checkpoint: Path) -> dict[str, bytes]:
    """Return the tensors and the state of a checkpoint."""
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.suffix in (".distcp", ".json")}


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    return {name: content for name, content in files(checkpoint).items() if name.endswith(".distcp")}


def steps_of(run: Path) -> list[dict]:
    return [line for line in metrics(run) if "learning_rate" in line]


def test_the_command_in_the_message_continues_the_run(options, mesh, tmp_path):
    args = options(output_dir=str(tmp_path / "advised"), save_steps=2)
    with pytest.raises(UserError, match=naming("3 grad_norm nan rows.jsonl")) as error:
        run(args, mesh, {3: NAN})
    assert not (tmp_path / "advised/checkpoint-4").exists()
    advice = re.search(r"--resume --skip_bad_steps (\d+)", error.value.hint or "")
    assert advice
    resumed = replace(args, resume=True, skip_bad_steps=float(advice[1]))
    rules.check(resumed)
    advised = run(resumed, mesh, {3: NAN})

    (decision,) = decisions_in(metrics(advised))
    assert (decision["step"], decision["fault"], decision["values"]["grad_norm"]) == (3, "bad_step", "nan")
    assert len(decision["rows"]) == args.global_batch_size
    assert all(re.search(r"rows.jsonl:\d+$", row) for row in decision["rows"])
    (step,) = (line for line in steps_of(advised) if line["step"] == 3)
    assert "grad_norm" not in step
    assert step["loss"] > 0

    # A run that skips from its start, and one whose third update is left out, end with the same state.
    skipped = run(options(output_dir=str(tmp_path / "skipped"), skip_bad_steps=6.0), mesh, {3: NAN})
    left_out = run(options(output_dir=str(tmp_path / "left_out")), mesh, {}, without_update(3))
    tensors = [tensors_of(each / "checkpoint-4") for each in (advised, skipped, left_out)]
    assert tensors[0] == tensors[1] == tensors[2]
    rates = [[line["learning_rate"] for line in steps_of(each)] for each in (advised, left_out)]
    assert rates[0] == rates[1]


def without_update(number: int) -> Callable[[Trainer], Trainer]:
    """Return a function that changes a trainer so that it leaves out one update."""

    def change(trainer: Trainer) -> Trainer:
        optimizer: Any = trainer.optimizer
        update, numbers = optimizer.step_with_ready_grads, iter(range(1, 1000))
        optimizer.step_with_ready_grads = lambda: next(numbers) != number and update()
        return trainer

    return change


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "no clipping": {"clip_grad": 0.0},
    "bfloat16": {"torch_dtype": "bfloat16"},
    "distributed": {"torch_dtype": "bfloat16", "use_distributed_optimizer": True},
    "8 bits": {"optimizer": "adamw_8bit"},
    "separate": {"mtp_clip_grad": 0.5},
    "heads": {"mtp_mode": "heads_only"},
    "router biases": {"moe_router_bias_update_rate": 1e-2},
}


@pytest.mark.parametrize("name", some_of(OPTIMIZERS, "distributed", "separate", "router biases"))
def test_a_bad_step_changes_nothing(options, mesh, tmp_path, name, torchao):
    changed = OPTIMIZERS[name]
    if "router" in name:
        changed = changed | {"model": str(make_tiny_hf(tmp_path / "moe", "glm4_moe", depth=1, with_tokenizer=True))}
    prepared = prepare(options(skip_bad_steps=6.0, **changed), mesh)
    trainer = training.make_trainer(prepared, phases.restore(prepared))
    scale_gradients(trainer, 0, {1: NAN, 3: NAN})
    before = state_of(trainer)
    trainer.step(1)
    assert state_of(trainer) == before
    trainer._save(1)  # an optimizer without an update can be saved, and makes the first update afterwards
    trainer.step(2)
    updated = state_of(trainer)
    assert updated != before
    assert {value for key, value in updated.items() if key.endswith("step")} <= {1.0}
    trainer.step(3)
    assert state_of(trainer) == updated
    trainer.step(4)
    assert state_of(trainer) != updated
    assert trainer.bad_steps.num_skipped == 2


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return the bits of all parameters and buffers, and of the state of the optimizer with its numbers of updates."""
    found: dict[str, Any] = {}
    for chunk in trainer.model:
        for name, tensor in chunk.state_dict().items():
            if isinstance(tensor, torch.Tensor):
                found[name] = tensor.detach().clone().view(torch.uint8).numpy().tobytes()
    for number, slot in enumerate(slots_of(trainer.optimizer)):
        for kind in slot.kinds:
            found[f"{number}.{kind}"] = slot.part(kind).detach().clone().numpy().tobytes()
        if slot.main is not None:
            found[f"{number}.step"] = float(slot.inner.state[slot.main].get("step", 0.0))
    return found


def sft_stream(directory: Path, mesh, model: Path) -> SftArgs:
    return options_in(directory, model)(streaming=True, split_dataset_ratio=0.0)


def dpo(directory: Path, mesh, model: Path) -> SftArgs:
    usual = options_in(directory, model)()
    pairs = str(write_pairs(directory / "pairs.jsonl"))
    return DpoArgs(**vars(usual) | {"dataset": [pairs], "global_batch_size": 4})


def grpo(directory: Path, mesh, model: Path) -> SftArgs:
    args = policy_options(model, directory)(train_iters=2, rollouts_from=str(directory / "rollouts"))
    for number in range(2):
        store(replace(args, rollouts_from=None), mesh, directory / "rollouts", number)
    return args


def gkd(directory: Path, mesh, model: Path) -> SftArgs:
    return gkd_options((model, make_teacher(directory / "teacher")), directory)(train_iters=2, lmbda=0.0)


METHODS = {
    "stream": (sft_stream, "row "),
    "dpo": (dpo, "pairs.jsonl:"),
    "grpo": (grpo, "prompts.jsonl:"),
    "gkd": (gkd, "rows.jsonl:"),
}


@pytest.mark.parametrize("name", METHODS)
def test_steps_of_every_method_can_be_skipped(tmp_path, mesh, hf_dir, name):
    make_args, row = METHODS[name]
    args = make_args(tmp_path, mesh, hf_dir)
    skips = run(replace(args, skip_bad_steps=6.0), mesh, {2: NAN})
    (decision,) = decisions_in(metrics(skips))
    assert decision["step"] == 2
    assert decision["rows"]
    assert all(row in each for each in decision["rows"])
    left_out = replace(args, output_dir=str(tmp_path / "left_out"))
    last = f"checkpoint-{args.train_iters}"
    assert tensors_of(skips / last) == tensors_of(run(left_out, mesh, {}, without_update(2)) / last)


def test_a_resumed_run_skips_the_steps_of_an_unbroken_one(options, mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(bad_steps, "NEEDED", 3)
    factors = {2: NAN, 7: 1e4, 8: 1e4, 9: 1e-3}
    usual = {"train_iters": 10, "skip_bad_steps": 6.0, "eval_steps": 100}
    unbroken = run(options(output_dir=str(tmp_path / "unbroken"), **usual), mesh, factors)
    args = options(output_dir=str(tmp_path / "stopped"), **usual)

    def stop_after(step: int) -> Callable[[Trainer], Trainer]:
        return lambda trainer: replace(
            trainer, after_step=lambda done: signal.raise_signal(signal.SIGTERM) if done == step else None
        )

    for step in (4, 7):  # before the statistics count, and between two bad steps
        stopped = run(args, mesh, factors, stop_after(step))
        assert (stopped / f"checkpoint-{step}").is_dir()
        args = replace(args, resume=True)
    resumed = run(args, mesh, factors)
    assert metrics(resumed) == metrics(unbroken)
    assert files(resumed / "checkpoint-10") == files(unbroken / "checkpoint-10")
    decisions = decisions_in(metrics(resumed))
    assert [line["step"] for line in decisions] == [2, 7, 8]
    assert decisions[1]["values"]["grad_norm"] > decisions[1]["limits"]["grad_norm"]
    state = json.loads((resumed / "checkpoint-10/trainer_state.json").read_text())["bad_steps"]
    assert (state["num_skipped"], state["in_a_row"], len(state["recent"]["loss"])) == (3, 0, 7)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_nan_never_reaches_a_checkpoint(options, mesh, async_save):
    """The update of a step is launched before the host reads the gradient norm; the step is not saved before that."""
    args = options(train_iters=9, save_steps=1, async_save=async_save)
    with pytest.raises(UserError, match=naming("7 grad_norm nan")):
        run(args, mesh, {7: NAN})
    saved = sorted(int(path.name.removeprefix("checkpoint-")) for path in Path(args.output_dir).glob("checkpoint-*"))
    assert saved == [1, 2, 3, 4, 5, 6][: len(saved)]
    assert len(saved) >= 6 - async_save  # the run can end before an asynchronous save


def test_many_bad_steps_in_a_row_end_the_run(options, mesh, monkeypatch):
    monkeypatch.setattr(bad_steps, "MAX_IN_A_ROW", 2)
    args = options(skip_bad_steps=6.0, train_iters=8, save_steps=1)
    with pytest.raises(UserError, match=naming("6 2 grad_norm nan")) as error:
        run(args, mesh, {2: NAN, 4: NAN, 5: NAN, 6: NAN})
    assert "--skip_bad_steps" not in (error.value.hint or "")
    decisions = decisions_in(metrics(Path(args.output_dir)))
    assert [line["step"] for line in decisions] == [2, 4, 5]
    assert (Path(args.output_dir) / "checkpoint-5").is_dir()  # the weights of step 3
    assert not (Path(args.output_dir) / "checkpoint-6").exists()


def test_which_steps_are_bad(mesh):
    """The rule of OLMo-core, computed with numpy."""
    generator = np.random.RandomState(0)
    judge, window = BadSteps(mesh, sigma=3.0), deque(maxlen=128)
    bad = []
    for number in range(600):
        loss, norm = generator.exponential(size=2).tolist()
        expected = True
        if len(window) >= 64:
            past = np.array(window)
            expected = bool(np.all([loss, norm] <= past.mean(0) + 3 * past.std(0, ddof=1)))
        if number % 100 == 50:
            loss, expected = (np.nan, np.inf, -np.inf)[number % 3], False
        assert judge.is_good({"loss": loss, "grad_norm": norm}) == expected, number
        if expected:
            window.append((loss, norm))
        bad.append(not expected)
    assert 6 < sum(bad) == judge.num_skipped < 100
    assert judge.is_good({"loss": 0.0, "grad_norm": 0.0})  # far below the mean is not bad
    assert BadSteps(mesh).is_good({"loss": NAN})  # without the option
    assert BadSteps(mesh).state() == {}
