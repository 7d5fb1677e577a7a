"""Test the evaluations of `megatron grpo`: completions of held-out prompts, scored during training."""

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swiftlite import rules
from swiftlite.args.commands import ExportArgs, GrpoArgs
from swiftlite.base.errors import OptionError, UserError
from swiftlite.base.heads import Heads
from swiftlite.engines.engine import EngineConfig, start_engine
from swiftlite.export.run import convert
from swiftlite.families.resolved import resolve
from swiftlite.plan.best_metric import known_metrics
from swiftlite.rollouts.draw import draw
from swiftlite.rollouts.engine import sampling_of
from swiftlite.rollouts.generation import Generation
from swiftlite.runtime.mesh import Mesh
from swiftlite.store.best import BEST_FILE
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.messages import naming
from tests.tiny import make_tiny_hf
from tests.train.completions import hf_log_p, make_teacher, metrics, policy_options, store, train, weights
from tests.train.prepared import prepare

REWARDS = """
def even(completion_ids, answer):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def number(completions):
    return [len(completions)] * len(completions)


def answered(completions, answer):
    return [None if each is None else 1 for each in answer]
"""
NUM_HELD_OUT = 5


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("model") / "hf", "qwen3", depth=1, with_tokenizer=True)


@pytest.fixture
def options(hf_dir, tmp_path) -> Callable[..., GrpoArgs]:
    """Return the options of a run of 3 steps that evaluates after each step, some of them replaced."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"query": f"What is {n} times {n}?", "answer": str(n * n)} for n in range(NUM_HELD_OUT)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual: dict[str, Any] = {
        "reward_funcs": ["even"],
        "external_plugins": [str(tmp_path / "rewards.py")],
        "val_dataset": [str(tmp_path / "held_out.jsonl")],
        "eval_steps": 1,
        "train_iters": 3,
        "micro_batch_size": 4,
        "max_completion_length": 8,
    }
    make = policy_options(hf_dir, tmp_path)
    return lambda **changed: make(**usual | changed)


def fit(args: GrpoArgs, mesh: Mesh) -> Path:
    """Train, with the evaluations before the first step and after the last one."""
    run = prepare(args, mesh)
    trainer = training.make_trainer(run, phases.restore(run))
    try:
        phases.fit(run, trainer, 0, training.make_held_out(run))
    finally:
        trainer.batches.release()
    return run.output_dir


def evaluations(run: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of held-out prompts by step."""
    lines = [line for line in metrics(run) if any(name.startswith("eval_") for name in line)]
    return {int(line.pop("step")): line for line in lines}


def drawn(args: GrpoArgs, mesh: Mesh, model: Path, step: int) -> Generation:
    """Return the completions of an evaluation, drawn by an engine that read the model's files."""
    config = EngineConfig(
        resolve(str(model)), "float32", num_speculative_tokens=1, max_model_len=128, draws_drafts=True
    )
    engine = start_engine("transformers", config)
    run = prepare(replace(args, output_dir=args.output_dir + "-again"), mesh)
    seed = zlib.crc32(f"{args.seed}/evaluation/{step}".encode())
    try:
        return draw(engine, replace(sampling_of(run, args), seed=seed), run.data.val, 0, {})
    finally:
        engine.close()


def test_held_out_prompts_are_scored_with_the_current_weights(options, mesh, hf_dir, tmp_path):
    """The rewards before and after training are those of completions of the model's files and of the exported ones."""
    args = options(temperature=0.8, train_iters=2)
    run = fit(args, mesh)
    found = evaluations(run)
    assert sorted(found) == [0, 1, 2]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The evaluations before step 1, and after step 1. An entry has the times since the previous one.
    assert [line["step"] for line in lines if "time/evaluation" in line] == [1, 2]
    after = tmp_path / "exported"
    convert(ExportArgs(model=args.output_dir, output_dir=str(after), to_hf=True), mesh)
    for step, model in ((0, hf_dir), (2, after)):
        generation = drawn(args, mesh, model, step)
        scores = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in generation.completions()]
        assert len(scores) == NUM_HELD_OUT
        assert found[step]["eval_reward"] == pytest.approx(np.mean(scores))
        assert found[step]["eval_rewards/even/mean"] == pytest.approx(np.mean(scores))
        assert found[step]["eval_reward_std"] == pytest.approx(np.std(scores, ddof=1))
        assert found[step]["eval_completions/mean_length"] == generation.completion_lengths.mean()
        assert found[step]["eval_rollout/acceptance_1"] == generation.figures["rollout/acceptance_1"]
    assert len({each["eval_reward"] for each in found.values()}) > 1
    names = {name.removeprefix("eval_") for name in found[0]}
    assert {*known_metrics(args, Heads(1))} == names | {"acceptance"}


def test_the_best_checkpoint_has_the_highest_reward(options, mesh):
    args = options(metric_for_best_model="reward", load_best_model_at_end=True, save_steps=1, lr=3e-2)
    rules.check(args)
    found = evaluations(fit(args, mesh))
    values = {step: line["eval_reward"] for step, line in found.items() if step}
    best = json.loads((Path(args.output_dir) / BEST_FILE).read_text())
    assert best["best_metric"] == max(values.values())
    assert values[best["best_global_step"]] == best["best_metric"]
    assert len({*values.values()}) > 1
    with pytest.raises(OptionError, match=naming("--metric_for_best_model loss reward rewards/even/mean")):
        rules.check(replace(args, metric_for_best_model=None, output_dir=args.output_dir + "-2"))


def test_evaluations_change_no_bit_of_training(options, mesh, tmp_path):
    changed: dict[str, Any] = {"steps_per_generation": 2, "max_completion_length": 4}
    with_evaluations = train(options(**changed), mesh)
    args = options(**changed, val_dataset=[], output_dir=str(tmp_path / "without"))
    without = train(args, mesh)
    assert sorted(evaluations(with_evaluations)) == [1, 2]
    assert not evaluations(without)
    trained = [line for line in metrics(with_evaluations) if "loss" in line]
    assert trained == metrics(without)
    expected, found = weights(without, mesh), weights(with_evaluations, mesh)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_divergence_from_the_teacher_is_evaluated(options, mesh, hf_dir, tmp_path):
    teacher = make_teacher(tmp_path / "teacher")
    args = options(teacher_model=str(teacher), reward_funcs=[], external_plugins=[], train_iters=1)
    found = evaluations(fit(args, mesh))
    assert sorted(found) == [0, 1]
    generation = drawn(args, mesh, hf_dir, 0)
    expected = (hf_log_p(hf_dir, generation) - hf_log_p(teacher, generation)).mean()
    # Sums of float32 in another order.
    assert found[0]["eval_teacher_kl"] == pytest.approx(float(expected), abs=2e-5)
    assert not [name for name in found[0] if "reward" in name]


def test_the_number_of_held_out_prompts_is_limited(options, mesh):
    """A global batch has 4 completions."""
    changed: dict[str, Any] = {"reward_funcs": ["number"], "global_batch_size": 4, "train_iters": 1}
    found = evaluations(fit(options(**changed, eval_iters=1), mesh))
    assert [each["eval_reward"] for each in found.values()] == [4, 4]


@pytest.mark.slow
def test_rows_without_a_column_are_scored_without_it(options, mesh, tmp_path):
    """Only one prompt has the column. Some generations, and the held-out prompt, do not have it."""
    rows = [{"query": f"What is {n}?"} | ({"answer": "1"} if n == 1 else {}) for n in range(6)]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = options(
        reward_funcs=["answered"], dataset=[str(tmp_path / "some.jsonl")], val_dataset=[], split_dataset_ratio=0.2
    )
    run = train(args, mesh)
    unscored = [line["rewards/unscored"] for line in metrics(run) if "loss" in line]
    assert min(unscored) < max(unscored) == args.global_batch_size
    assert all(line["eval_rewards/unscored"] == 1 and "eval_reward" not in line for line in evaluations(run).values())


def test_held_out_rows_without_a_required_column_are_refused(options, mesh, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"query": "What is 1?"}\n')
    with pytest.raises(UserError, match=naming("even --val_dataset answer")):
        prepare(options(), mesh)


def test_stored_rollouts_are_not_evaluated(options, mesh, tmp_path):
    """There is no engine."""
    args = options(train_iters=1, reward_funcs=[], rollouts_from=str(tmp_path / "rollouts"))
    store(args, mesh, tmp_path / "rollouts")
    rules.check(args, 1)
    assert not evaluations(fit(args, mesh))
