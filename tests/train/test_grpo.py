"""Test `megatron grpo` in one process with the transformers engine: rollouts, resuming, log-probabilities, errors."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from swiftlite import rules
from swiftlite.args.commands import ExportArgs, GrpoArgs
from swiftlite.base.errors import OptionError, UserError
from swiftlite.data.rows.prompt import COLUMNS
from swiftlite.engines.transformers.info import TRANSFORMERS
from swiftlite.engines.vllm.info import VLLM
from swiftlite.export.run import convert
from swiftlite.rollouts.engine import engine_kwargs
from swiftlite.rollouts.generation import Generation
from swiftlite.rollouts.training import open_rollouts
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.messages import mentions, naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.completions import (
    first_step,
    hf_log_p,
    make_teacher,
    metrics,
    policy_options,
    store,
    train,
    train_and_stop,
    weights,
)
from tests.train.prepared import prepare

REWARDS = """
def even(completion_ids, answer, **columns):
    assert all(isinstance(each, str) for each in answer)
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def short(completions):
    return [None if index % 5 == 4 else -len(text) / 100 for index, text in enumerate(completions)]


def mixed(completion_ids, answer):
    return [int(a) % 4 and sum(i % 5 for i in ids) for ids, a in zip(completion_ids, answer)]


def broken(completions):
    raise ValueError("no reward today")
"""

DYNAMIC: dict[str, Any] = {"dynamic_sample": True, "reward_funcs": ["mixed"], "reward_weights": []}
NOTHING = "return [None] * len(completions)"
DRAFTED: dict[str, Any] = {"speculative": "mtp", "mtp_lr": 1e-2}


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("model") / "hf", "qwen3", depth=1, with_tokenizer=True)


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher") / "hf")


def options_in(directory: Path, hf_dir: Path) -> Callable[..., GrpoArgs]:
    """Return a function that returns the options of a run of 3 steps, some of them replaced."""
    plugin = directory / "rewards.py"
    plugin.write_text(REWARDS)
    usual: dict[str, Any] = {
        "reward_funcs": ["even", "short"],
        "reward_weights": [1.0, 0.1],
        "external_plugins": [str(plugin)],
        "train_iters": 3,
        "micro_batch_size": 4,
        "max_completion_length": 8,
        "save_steps": 2,
    }
    make = policy_options(hf_dir, directory)
    return lambda **changed: make(**usual | changed)


@pytest.fixture
def options(hf_dir, tmp_path):
    return options_in(tmp_path, hf_dir)


@pytest.fixture(scope="module")
def whole(hf_dir, mesh, tmp_path_factory) -> Path:
    """Return the directory of a run with the options `DRAFTED`, which tests must not change."""
    return train(options_in(tmp_path_factory.mktemp("whole"), hf_dir)(**DRAFTED), mesh)


def test_completions_are_scored_stored_and_drafted(options, whole, hf_dir):
    args, run = options(**DRAFTED), whole
    lines = metrics(run)
    assert len(lines) == 3
    for line in lines:
        assert line["rewards/even/mean"] > 0 > line["rewards/short/mean"]
        assert line["reward"] == pytest.approx(line["rewards/even/mean"] + 0.1 * line["rewards/short/mean"], abs=0.1)
        assert 0 <= line["rollout/acceptance_1"] <= 1
        assert line["rewards/failures"] == 0
        # The engine computes with the weights of the trainer, after each update.
        assert line["rollout/importance_weight"] == pytest.approx(1, abs=1e-4)
        assert 0 < line["entropy"] <= 1.5 * math.log(line_vocabulary(hf_dir))
    for number in range(3):
        stored = Generation.load(run / "rollouts" / f"{number:06d}.safetensors")
        readable = (run / "rollouts" / f"{number:06d}.jsonl").read_text().splitlines()
        assert len(stored) == len(readable) == args.global_batch_size
        assert np.isfinite(stored.engine_log_p).all()
        assert (stored.engine_log_p <= 0).all()
        assert set(json.loads(readable[0])) >= {"prompt", "completion", "scores", "advantage"}
        tokens = json.loads(readable[0])["tokens"]
        assert "".join(token["text"] for token in tokens) == json.loads(readable[0])["completion"]
        assert [token["depth"] for token in tokens] == stored.depths()[0]
        assert set(stored.draft_depths.tolist()) == {0, 1}
        groups = stored.advantages.reshape(-1, args.num_generations)
        assert np.allclose(groups.sum(axis=1), 0, atol=1e-4)


def test_a_table_has_the_completions_of_a_generation(options, whole, mesh):
    args = options(**DRAFTED, log_completions=True, rollouts_from=str(whole / "rollouts"))
    run = prepare(args, mesh)
    batches = open_rollouts(run)
    batches.get(0)
    table = batches.table(0)
    assert table is not None
    assert table.columns == ["prompt", "completion", *args.reward_funcs, "advantage"]
    readable = map(json.loads, (whole / "rollouts" / "000000.jsonl").read_text().splitlines())
    assert [[row[1], row[-1]] for row in table.rows] == [[each["completion"], each["advantage"]] for each in readable]
    batches.release()


def line_vocabulary(hf_dir: Path) -> int:
    return json.loads((hf_dir / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize(("speculative", "temperature"), some_of([("mtp", 0.7), ("none", 1.0)], ("mtp", 0.7)))
def test_log_probabilities_are_those_of_transformers(options, mesh, hf_dir, temperature, speculative):
    args = options(temperature=temperature, speculative=speculative, train_iters=1, steps_per_generation=2)
    run = train(args, mesh)
    stored = Generation.load(run / "rollouts" / "000000.safetensors")
    expected = hf_log_p(hf_dir, stored, temperature)
    # Float32 products in another order.
    np.testing.assert_allclose(stored.old_log_p, expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(stored.engine_log_p, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changed", "stop"),
    [
        pytest.param({"steps_per_generation": 2, "num_iterations": 2}, 2, marks=pytest.mark.slow),
        (DYNAMIC, 1),
        ({"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "num_iterations": 2, "lr": 0.01}, 1),
        ({"async_rollouts": 1, "lr": 0.01}, 2),
        pytest.param({"async_rollouts": 1, "steps_per_generation": 2, "num_iterations": 2}, 2, marks=pytest.mark.slow),
        pytest.param({"eval_steps": 1}, 2, marks=pytest.mark.slow),
        pytest.param(
            {"teacher_kl_coef": 2.0, "num_iterations": 2, "reward_funcs": [], "reward_weights": []},
            1,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_resumed_run_equals_the_unbroken_one(options, teacher_dir, mesh, tmp_path, changed, stop):
    """It is stopped after the generation that follows the checkpoint was drawn."""
    changed = changed | {"train_iters": 4, "max_completion_length": 4}
    if "teacher_kl_coef" in changed:
        changed["teacher_model"] = str(teacher_dir)
    if "eval_steps" in changed:
        changed["val_dataset"] = [str(tmp_path / "held_out.jsonl")]
        (tmp_path / "held_out.jsonl").write_text('{"query": "What is 8 plus 8?", "answer": "16"}\n')
    whole = train(options(**changed), mesh)
    stopped = train_and_stop(options(output_dir=str(tmp_path / "stopped"), **changed), mesh, stop)
    drawn = {path.name: path.read_bytes() for path in (stopped / "rollouts").glob("*.safetensors")}
    resumed = train(options(output_dir=str(tmp_path / "stopped"), resume=True, **changed), mesh)
    for name, content in drawn.items():
        assert (resumed / "rollouts" / name).read_bytes() == content
    assert metrics(resumed) == metrics(whole)
    expected, found = weights(whole, mesh), weights(resumed, mesh)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
def test_a_generation_that_was_drawn_ahead_is_resumed_twice(options, mesh, tmp_path):
    """The second time is between two steps on it, when the weights are no longer those of its policy."""
    changed: dict[str, Any] = {"async_rollouts": 1, "num_iterations": 2, "train_iters": 4, "save_steps": 1}
    changed |= {"max_completion_length": 4, "lr": 0.05, "lr_warmup_fraction": 0.0, "beta": 0.1}
    whole = train(options(**changed), mesh)
    stopped = options(output_dir=str(tmp_path / "stopped"), **changed)
    train_and_stop(stopped, mesh, 0)
    for stop in (1, 2):
        train_and_stop(replace(stopped, resume=True), mesh, stop)
    resumed = train(replace(stopped, resume=True), mesh)
    assert metrics(resumed) == metrics(whole)
    expected, found = weights(whole, mesh), weights(resumed, mesh)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_with_adapters_the_reference_is_the_policy_without_them(options, hf_dir, mesh):
    changed: dict[str, Any] = {"lr": 0.05, "lr_warmup_fraction": 0.0, "train_iters": 2, "beta": 0.1}
    run = train(options(tuner_type="lora", lora_rank=4, use_dora=True, **changed), mesh)
    first, second = (Generation.load(run / "rollouts" / f"{number:06d}.safetensors") for number in range(2))
    for generation in (first, second):
        np.testing.assert_allclose(generation.reference_log_p, hf_log_p(hf_dir, generation), rtol=0, atol=2e-5)
    assert np.abs(second.reference_log_p - second.engine_log_p).max() > 1e-3
    lines = metrics(run)
    assert lines[0]["kl"] < 1e-9 < 1e-4 < lines[1]["kl"]


def test_completions_are_drawn_with_the_weights_before_the_generation_before(options, mesh, tmp_path):
    """With --async_rollouts, generations 0 and 1 have the policy of the model, generation 2 that after step 1."""
    changed: dict[str, Any] = {"lr": 0.02, "lr_warmup_fraction": 0.0, "save_steps": 1}
    run = train(options(async_rollouts=1, **changed), mesh)
    generations = [Generation.load(run / "rollouts" / f"{number:06d}.safetensors") for number in range(3)]
    still = train(options(output_dir=str(tmp_path / "still"), train_iters=2, lr=1e-12), mesh)
    for number in range(2):
        expected = Generation.load(still / "rollouts" / f"{number:06d}.safetensors")
        assert generations[number].completions() == expected.completions()
    convert(ExportArgs(to_hf=True, model=str(run / "checkpoint-1"), output_dir=str(tmp_path / "hf")), mesh)
    np.testing.assert_allclose(generations[2].engine_log_p, hf_log_p(tmp_path / "hf", generations[2]), atol=2e-5)
    first, *later = [line["rollout/importance_weight"] for line in metrics(run)]
    assert first == pytest.approx(1, abs=1e-4)
    assert all(abs(weight - 1) > 1e-3 for weight in later)


def test_stored_rollouts_give_the_same_run(options, whole, mesh):
    again = options(**DRAFTED, rollouts_from=str(whole / "rollouts"), reward_funcs=[], reward_weights=[])
    rules.check(again, 1)
    # The ratio is that of the trainer's and the engine's probabilities, which are rounded differently.
    for found, expected in zip(metrics(train(again, mesh)), metrics(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_completions_of_another_policy_are_weighted(options, whole, mesh):
    """The ratio is that of this run's policy and the one that generated the completions."""
    changed: dict[str, Any] = {"rollouts_from": str(whole / "rollouts"), "lr": 0.05, "lr_warmup_fraction": 0.0}
    first, later = metrics(train(options(train_iters=2, **changed), mesh))
    assert first["clip_ratio/region_mean"] == 0
    assert later["clip_ratio/region_mean"] > 0


def test_a_step_without_whole_completions_changes_nothing(options, mesh, tmp_path):
    """With --overlong_filter, a batch can have no token to train, for the policy and for the heads."""
    stored = tmp_path / "stored"
    args = options(rollouts_from=str(stored), overlong_filter=True, train_iters=1)
    generation = store(args, mesh, stored)
    replace(generation, is_truncated=np.ones(len(generation), np.bool_)).save(stored / "000000.safetensors")
    found, gradients = first_step(args, mesh)
    assert found["loss"] == 0
    assert all(math.isfinite(value) for value in found.values())
    assert not any(gradient.any() for gradient in gradients.values())


def test_the_reference_is_computed_for_stored_rollouts(options, whole, mesh, tmp_path):
    """The first step has the weights of the reference model, so its KL divergence is 0."""
    stored = {"rollouts_from": str(whole / "rollouts"), "beta": 0.1, "lr_warmup_fraction": 0.0}
    first, later = metrics(train(options(train_iters=2, **stored), mesh))
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert later["kl"] > 1e-6
    other = make_tiny_hf(tmp_path / "other", "qwen3", depth=1, seed=1, with_tokenizer=True)
    stored |= {"ref_model": str(other), "output_dir": str(tmp_path / "other-kl")}
    assert first_step(options(**stored), mesh)[0]["kl"] > 0.01


def test_a_model_without_heads_is_trained(options, mesh):
    run = train(options(mtp_num_layers=0, train_iters=1), mesh)
    (line,) = metrics(run)
    assert not [name for name in line if name.startswith(("mtp", "rollout/acceptance"))]


def test_reward_functions_are_loaded_before_the_model(options, mesh, hf_dir, tmp_path):
    """The model is not read, so its damage is not found."""
    model = tmp_path / "damaged"
    shutil.copytree(hf_dir, model)
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=naming("--reward_funcs nothing")):
        prepare(options(model=str(model), reward_funcs=["nothing"], reward_weights=[]), mesh)
    args = options(model=str(model), reward_funcs=["accuracy"], reward_weights=[])
    Path(args.dataset[0]).write_text('{"query": "What is 1 plus 1?"}\n' * 4)
    with pytest.raises(UserError, match=naming("accuracy solution answer")):
        prepare(args, mesh)


@pytest.mark.parametrize(
    ("reward", "unscored"), some_of([("return [0.5] * len(completions)", 0), (NOTHING, 12)], (NOTHING, 12))
)
def test_rewards_without_a_difference_are_counted(options, mesh, reward, unscored, hf_dir):
    """All rewards are equal, or there is no reward. The policy loss has no gradient, and the run goes on."""
    args = options(reward_funcs=["flat"], reward_weights=[], mtp_num_layers=0, train_iters=1, weight_decay=0.0)
    Path(args.external_plugins[0]).write_text(f"def flat(completions):\n    {reward}\n")
    run = train(args, mesh)
    (line,) = metrics(run)
    assert line["frac_reward_zero_std"] == 1
    assert line["rewards/unscored"] == unscored
    assert line["grad_norm"] == 0
    assert ("reward" in line) == (not unscored)
    before, after = load_file(hf_dir / "model.safetensors"), weights(run, mesh)
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_groups_without_a_difference_are_replaced(options, mesh, tmp_path):
    """The rewards of every second prompt are equal. Each generation has 3 of the 6 prompts."""
    dynamic = DYNAMIC | {"train_iters": 2}
    args = options(**dynamic)
    run = train(args, mesh)
    plain = dynamic | {"dynamic_sample": False, "output_dir": str(tmp_path / "plain")}
    flat = first_step(options(**plain), mesh)[0]["frac_reward_zero_std"]
    assert flat > 0
    samples = prepare(args, mesh).data.train
    for number, line in enumerate(metrics(run)):
        assert line["frac_reward_zero_std"] == 0
        stored = Generation.load(run / "rollouts" / f"{number:06d}.safetensors")
        rows = stored.settings["rows"]
        assert len(set(rows)) == 3
        expected = [samples[row].input_ids for row in rows for _ in range(args.num_generations)]
        assert np.array_equal(stored.prompt_ids, np.concatenate(expected))
        answers = [json.loads(samples[row].extras[COLUMNS])["answer"] for row in rows]
        assert all(int(answer) % 4 for answer in answers)
        groups = stored.advantages.reshape(3, -1)
        assert np.allclose(groups.sum(axis=1), 0, atol=1e-4)
        assert (groups.std(axis=1) > 0).all()
        assert len({tuple(ids) for ids in stored.completions()}) > 6
        assert line["rollout/replaced_groups"] <= line["rollout/further_prompts"] <= 3
    first = metrics(run)[0]  # later generations are drawn with other weights
    assert first["rollout/replaced_groups"] == round(3 * flat)
    stored = {"rollouts_from": str(run / "rollouts"), "reward_funcs": []}
    again = metrics(train(options(**dynamic | stored, output_dir=str(tmp_path / "again")), mesh))
    assert [line["reward"] for line in again] == [line["reward"] for line in metrics(run)]
    with pytest.raises(UserError, match=naming("24 --steps_per_generation")):
        first_step(options(**dynamic | stored, steps_per_generation=2), mesh)
    path = run / "rollouts" / "000000.safetensors"
    whole = Generation.load(path)
    for rows in (["a"] * 3, [-1] * 3, [1000] * 3, {"0": 1, "1": 1, "2": 1}):
        replace(whole, settings={**whole.settings, "rows": rows}).save(path)
        with pytest.raises(UserError, match=naming("000000.safetensors --dataset --seed")):
            first_step(options(**dynamic | stored), mesh)


@pytest.mark.parametrize(
    ("reward", "further"),
    some_of([(NOTHING, 3), ("raise ValueError", 0)], ("raise ValueError", 0)),
)
def test_groups_stay_if_there_is_no_replacement(options, mesh, reward, further):
    """All prompts have been tried, or a failed function scores none."""
    args = options(**DYNAMIC | {"reward_funcs": ["flat"], "train_iters": 1})
    Path(args.external_plugins[0]).write_text(f"def flat(completions):\n    {reward}\n")
    (line,) = metrics(train(args, mesh))
    assert line["frac_reward_zero_std"] == 1
    assert line["rollout/replaced_groups"] == 0
    assert line["rollout/further_prompts"] == further


def test_rollouts_that_cannot_be_written_are_found_before_the_first_step(options, mesh):
    args = options()
    Path(args.output_dir).mkdir()
    (Path(args.output_dir) / "rollouts").write_text("a file")
    with pytest.raises(UserError, match=naming("--output_dir rollouts")):
        train(args, mesh)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "000000.safetensors"),
        (lambda path: path.unlink(), "--rollouts_from 0 1"),
    ],
)
def test_damaged_rollouts_are_named(options, mesh, tmp_path, damage, named):
    args = options(rollouts_from=str(tmp_path / "rollouts"), train_iters=1)
    store(args, mesh, tmp_path / "rollouts")
    damage(tmp_path / "rollouts" / "000000.safetensors")
    with pytest.raises(UserError, match=naming(named)):
        first_step(args, mesh)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        pytest.param({"temperature": 0.5}, "--temperature", marks=pytest.mark.slow),
        ({"seed": 7}, "--dataset --seed"),
        pytest.param({"steps_per_generation": 2}, "24 --steps_per_generation", marks=pytest.mark.slow),
    ],
)
def test_rollouts_of_another_run_are_refused(options, mesh, tmp_path, changed, named):
    directory = str(tmp_path / "rollouts")
    usual = {"rollouts_from": directory, "train_iters": 1}
    store(options(**usual), mesh, tmp_path / "rollouts")
    with pytest.raises(UserError, match=naming(named)):
        first_step(options(**usual | changed), mesh)


@pytest.mark.parametrize(
    ("place", "steps", "named"),
    some_of([("rollouts", 2, "1 2 --train_iters"), ("", 1, "rollouts")], ("rollouts", 2, "1 2 --train_iters")),
)
def test_missing_generations_are_named_before_the_first_step(options, mesh, tmp_path, place, steps, named):
    args = options(rollouts_from=str(tmp_path / place), train_iters=steps)
    store(args, mesh, tmp_path / "rollouts")
    with pytest.raises(UserError, match=naming(f"--rollouts_from {named}")):
        first_step(args, mesh)


def test_unscored_completions_are_scored_by_the_resumed_run(options, mesh, tmp_path):
    """A function failed in all generations, which ended the run with its traceback, and was corrected then."""
    changed: dict[str, Any] = {"reward_funcs": ["broken"], "reward_weights": [], "save_steps": 100}
    args = options(**changed)
    with pytest.raises(UserError, match=naming("broken --resume ValueError rewards.py")):
        train(args, mesh)
    lines = metrics(Path(args.output_dir))
    assert [line["rewards/failures"] for line in lines] == [1, 1]
    assert all("rewards/broken/mean" not in line for line in lines)
    plugin = tmp_path / "rewards.py"
    plugin.write_text(REWARDS.replace('raise ValueError("no reward today")', "return list(range(len(completions)))"))
    resumed = train(options(**changed, resume=True), mesh)
    lines = metrics(resumed)
    assert len(lines) == 3
    assert all(line["reward"] == pytest.approx(5.5) and line["rewards/failures"] == 0 for line in lines)


def test_a_generation_drawn_for_one_step_is_used_for_two(options, mesh):
    """The run was stopped before its first step. The second iteration is relative to the policy before the first."""
    changed: dict[str, Any] = {"lr": 0.05, "lr_warmup_fraction": 0.0, "save_steps": 100, "train_iters": 2}
    run = prepare(options(**changed), mesh)
    trainer = training.make_trainer(run, phases.restore(run))
    trainer.batches.get(0)
    trainer.batches.release()
    trainer.close()
    lines = metrics(train(options(**changed, resume=True, num_iterations=2), mesh))
    assert [line["rollout/importance_weight"] for line in lines] == pytest.approx([1, 1], abs=1e-4)
    assert lines[1]["clip_ratio/region_mean"] > 0


def test_rows_that_leave_room_for_a_completion_are_not_truncated(options, mesh):
    data = prepare(options(), mesh).data
    assert (data.report.total.kept, data.report.total.truncated) == (6, 0)


@pytest.mark.slow
def test_prompts_without_room_are_named(options, mesh):
    """The hint is the length that prompt and completion need."""
    with pytest.raises(UserError) as caught:
        train(options(max_length=16), mesh)
    assert "--truncation_strategy" not in str(caught.value)
    (needed,) = re.findall(r"use --max_length (\d+)", str(caught.value))
    assert train(options(max_length=int(needed), train_iters=1), mesh)
    with pytest.raises(UserError):
        train(options(max_length=int(needed) - 1, train_iters=1), mesh)


def test_named_rewards_are_checked_with_the_options_of_the_run(options):
    named: dict[str, Any] = {"reward_funcs": ["length"], "reward_weights": [], "external_plugins": []}
    rules.check(options(**named), 1)
    with pytest.raises(OptionError, match=naming("--soft_cache_length 13 --max_completion_length 12")):
        rules.check(options(**named, max_completion_length=12, soft_cache_length=13), 1)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"reward_funcs": []}, "--reward_funcs --teacher_model"),
        ({"reward_weights": [1.0]}, "--reward_weights"),
        ({"external_plugins": ["none.py"]}, "--external_plugins none.py"),
        ({"global_batch_size": 14}, "--global_batch_size 16"),
        ({"max_completion_length": 128}, "--max_completion_length --max_length"),
        ({"packing": True}, "--packing --padding_free"),
        ({"loss_type": "cispo"}, "--epsilon_high"),
        ({"delta": 1.1}, "--delta"),
        ({"sync_ref_model": True}, "--sync_ref_model --beta 0"),
        ({"sync_ref_model": True, "beta": 0.1, "tuner_type": "lora"}, "--sync_ref_model --tuner_type lora"),
        (
            {"sync_ref_model": True, "beta": 0.1, "ref_pipeline_model_parallel_size": 1},
            "--sync_ref_model --ref_pipeline_model_parallel_size 1",
        ),
        ({"beta": 0.1, "ref_tensor_model_parallel_size": 2}, "reference --ref_tensor_model_parallel_size 2"),
        ({"reward_server": ["a:8001"], "reward_weights": []}, "--reward_server a:8001 http://HOST:PORT"),
        ({"reward_server": ["http://a:1"] * 2, "reward_weights": []}, "--reward_server http://a:1"),
        ({"mtp_mode": "heads_only"}, "--mtp_mode heads_only"),
        ({"mtp_loss": "ce"}, "--mtp_loss kl"),
        ({"mtp_num_layers": 2}, "--mtp_num_layers"),
        ({"streaming": True}, "--streaming"),
        ({"truncation_strategy": "left"}, "--truncation_strategy"),
        ({"rollouts_from": "nowhere"}, "--rollouts_from nowhere"),
        ({"num_generations": 1}, "--num_generations"),
        ({"vllm_engine_kwargs": {"seed": 1}}, "--vllm_engine_kwargs --infer_backend transformers"),
        ({"weight_transport": "ipc"}, "--weight_transport ipc --infer_backend transformers"),
        (
            {"weight_transport": "ipc", "infer_backend": "vllm", "vllm_engine_kwargs": {"data_parallel_size": 2}},
            "--weight_transport ipc --vllm_engine_kwargs",
        ),
        ({"vllm_engine_kwargs": {"max_model_len": 9}, "infer_backend": "vllm"}, "--vllm_engine_kwargs --max_length"),
        ({"sglang_engine_kwargs": {}, "infer_backend": "vllm"}, "--sglang_engine_kwargs --infer_backend vllm"),
        ({"draft_schedule": "bench.json"}, "--draft_schedule --infer_backend vllm"),
        ({"draft_schedule": "none.json", "infer_backend": "vllm"}, "--draft_schedule none.json"),
        ({"draft_schedule": "bench.json", "rollout_server": ["http://a:8000"]}, "--draft_schedule --rollout_server"),
    ],
)
def test_invalid_options_are_named(options, changed, named):
    args: GrpoArgs = options(**changed)
    with pytest.raises(OptionError, match=naming(named)):
        rules.check(args, 1)


def test_layouts_without_effect_are_named(options):
    layout = {"ref_tensor_model_parallel_size": 1, "teacher_pipeline_model_parallel_size": 1}
    notes = [*rules.check(options(**layout), 1), *rules.check(options(**layout, beta=0.1, tuner_type="lora"), 1)]
    for words in ("--ref_tensor_model_parallel_size --beta 0", "--ref_tensor_model_parallel_size adapters"):
        assert any(mentions(note, words) for note in notes), words
    assert any(mentions(note, "--teacher_pipeline_model_parallel_size --teacher_model") for note in notes)


def test_an_engine_on_the_gpu_of_the_trainer_leaves_it_memory(options):
    assert engine_kwargs(options(infer_backend="vllm"), is_cuda=True) == {"gpu_memory_utilization": 0.3}
    assert engine_kwargs(options(infer_backend="vllm"), is_cuda=False) == {}
    assert engine_kwargs(options(), is_cuda=True) == {}
    given = {"gpu_memory_utilization": 0.5, "seed": 1}
    assert engine_kwargs(options(infer_backend="vllm", vllm_engine_kwargs=given), is_cuda=True) == given
    assert VLLM.shares_gpu(given)
    assert not VLLM.shares_gpu({"tensor_parallel_size": 2})
    assert not TRANSFORMERS.shares_gpu(None)
