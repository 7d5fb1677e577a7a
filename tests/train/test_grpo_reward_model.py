"""Test `megatron grpo --reward_model` in one process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftlite import rules
from swiftlite.base.errors import OptionError
from swiftlite.rollouts.generation import Generation
from swiftlite.rollouts.reward_models import reward_process
from tests.messages import mentions, naming
from tests.tiny import make_tiny_hf
from tests.train.completions import metrics, policy_options, train, train_and_stop
from tests.train.reward_models import make_reward_model

LAYOUT = {"reward_tensor_model_parallel_size": 1}


@pytest.fixture
def options(tmp_path):
    hf_dir = make_tiny_hf(tmp_path / "hf", "qwen3", with_tokenizer=True)
    make = policy_options(hf_dir, tmp_path)
    judge = make_reward_model(tmp_path / "judge", seed=1, initializer_range=0.3)
    usual = {"reward_model": [str(judge)], "num_generations": 6, "max_completion_length": 8, "global_batch_size": 24}
    return lambda **changed: make(**usual | changed)


@pytest.mark.slow
def test_the_reward_of_a_model_rises(options, mesh):
    lines = metrics(train(options(train_iters=25, lr=3e-3), mesh))
    rewards = [line["rewards/judge/mean"] for line in lines]
    spread = np.mean([line["reward_std"] for line in lines[:5]])
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + spread
    assert all(line["rewards/failures"] == 0 for line in lines)


def test_a_changed_model_scores_stored_completions_again(options, mesh, tmp_path):
    """The weights are in the order of the functions, then of the models."""
    args = options(reward_funcs=["length"], reward_weights=[0.5, 2.0], soft_cache_length=8, save_steps=1)
    rules.check(args, 1)
    run = train(args, mesh)
    (line,) = metrics(run)
    assert line["reward"] == pytest.approx(0.5 * line["rewards/length/mean"] + 2 * line["rewards/judge/mean"], abs=1e-4)

    file = next((run / "rollouts").glob("*.safetensors"))
    before = Generation.load(file)
    make_reward_model(Path(args.reward_model[0]), seed=2, initializer_range=0.3)
    (run / "checkpoint-1").rename(tmp_path / "checkpoint-1")
    train(replace(args, resume=True), mesh)
    after = Generation.load(file)
    assert np.array_equal(after.completion_ids, before.completion_ids)
    assert np.array_equal(after.scores[:, 0], before.scores[:, 0])
    assert np.abs(after.scores[:, 1] - before.scores[:, 1]).min() > 1e-6


def test_what_a_model_with_a_layout_scored_counts_as_scored_by_the_process(options, mesh, tmp_path):
    """The model also scores evaluations."""
    (tmp_path / "held_out.jsonl").write_text('{"query": "What is 8 plus 8?"}\n')
    usual: dict[str, Any] = {"reward_funcs": ["length"], "reward_weights": [0.5, 2.0], "soft_cache_length": 3}
    usual |= {"val_dataset": [str(tmp_path / "held_out.jsonl")], "eval_steps": 1, "train_iters": 2}
    args = options(**usual, **LAYOUT)
    rules.check(args, 1)
    run = train(args, mesh)
    file = run / "rollouts" / "000000.safetensors"
    assert Generation.load(file).settings["scoring"]["rewards"] == reward_process(options(**usual)).identity
    evaluations = [line for line in metrics(run) if "eval_reward" in line]
    assert evaluations
    assert all(np.isfinite(line["eval_reward"]) for line in evaluations)


def test_a_generation_that_was_drawn_ahead_is_scored_before_it_is_written(options, mesh, tmp_path):
    """The model cannot score it while the trainer trains. A resumed run trains on the same scores."""
    changed: dict[str, Any] = LAYOUT | {"async_rollouts": 1, "train_iters": 3, "save_steps": 1, "lr": 1e-2}
    changed |= {"global_batch_size": 12, "max_completion_length": 4}
    whole = train(options(**changed), mesh)
    stopped = options(**changed, output_dir=str(tmp_path / "stopped"))
    train_and_stop(stopped, mesh, 1)
    resumed = train(replace(stopped, resume=True), mesh)
    assert metrics(resumed) == metrics(whole)
    for number in range(3):
        file = f"rollouts/{number:06d}.safetensors"
        of_whole, of_resumed = (Generation.load(run / file) for run in (whole, resumed))
        assert np.array_equal(of_whole.scores, of_resumed.scores)
        assert of_whole.advantages.any()


def test_rules(options):
    policy, judge = options().model, options().reward_model
    with pytest.raises(OptionError, match=naming("--reward_model Qwen3ForCausalLM --reward_weights 2 1 hf")):
        rules.check(options(reward_model=[policy], reward_weights=[1.0, 1.0]), 1)
    with pytest.raises(OptionError, match=naming("--reward_model judge")):
        rules.check(options(reward_model=judge * 2), 1)


def test_rules_of_layouts(options, tmp_path):
    sizes = "--reward_tensor_model_parallel_size --reward_pipeline_model_parallel_size"
    with pytest.raises(OptionError, match=naming(f"--reward_model {sizes} 3")):
        rules.check(options(reward_pipeline_model_parallel_size=3), 3)
    with pytest.raises(OptionError, match=naming(f"--async_rollouts --dynamic_sample {sizes}")):
        rules.check(options(**LAYOUT, async_rollouts=1, dynamic_sample=True), 1)
    (judge,) = options().reward_model
    config = Path(judge) / "config.json"
    declared = json.loads(config.read_text())
    config.write_text(json.dumps({**declared, "id2label": {"0": "bad", "1": "good"}}))
    with pytest.raises(OptionError, match=naming("--reward_model 2")):
        rules.check(options(**LAYOUT), 1)
    config.write_text(
        json.dumps({**declared, "model_type": "bert", "architectures": ["BertForSequenceClassification"]})
    )
    rules.check(options(), 1)  # transformers can open it in the process
    with pytest.raises(OptionError, match=naming(f"--reward_model megatron rm {sizes}")):
        rules.check(options(**LAYOUT), 1)
    notes = rules.check(options(reward_model=[], reward_funcs=["length"], soft_cache_length=8, **LAYOUT), 1)
    assert any(mentions(note, "--reward_tensor_model_parallel_size --reward_model") for note in notes)
