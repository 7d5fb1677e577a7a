"""Test `megatron grpo --reward_model` in one process."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swiftlite import rules
from swiftlite.base.errors import OptionError
from swiftlite.rollouts.generation import Generation
from tests.messages import naming
from tests.tiny import make_tiny_hf
from tests.train.completions import metrics, policy_options, train
from tests.train.reward_models import make_reward_model


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


def test_rules(options):
    policy, judge = options().model, options().reward_model
    with pytest.raises(OptionError, match=naming("--reward_model Qwen3ForCausalLM --reward_weights 2 1 hf")):
        rules.check(options(reward_model=[policy], reward_weights=[1.0, 1.0]), 1)
    with pytest.raises(OptionError, match=naming("--reward_model judge")):
        rules.check(options(reward_model=judge * 2), 1)
