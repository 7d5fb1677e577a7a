"""Test `megatron grpo` with reward models in a layout of their own against transformers."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from swiftlite.args.commands import GrpoArgs
from swiftlite.rewards.advantages import AdvantageSettings, compute_advantages
from swiftlite.rollouts.generation import Generation
from tests.parallel.parity import SIZES
from tests.parallel.runs import run_all, start
from tests.tiny import make_tiny_hf, make_tiny_tokenizer
from tests.train.completions import NUM_GENERATIONS, policy_options
from tests.train.reward_models import hf_scores, make_reward_model

pytestmark = pytest.mark.gloo

WEIGHTS = [0.5, 2.0, -1.0]
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def rewards(tensor: int | None = None, pipeline: int | None = None) -> dict[str, Any]:
    return {"reward_tensor_model_parallel_size": tensor, "reward_pipeline_model_parallel_size": pipeline}


LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2, reward models DP2": TP2 | rewards(1) | {"dynamic_sample": True, "max_resample_times": 1},
    "PP2, reward models TP2": rewards(2, 1) | {"pipeline_model_parallel_size": 2},
    "DP2, packed, reward models PP2": rewards(pipeline=2) | {"padding_free": True, "async_rollouts": 1},
    "CP2": rewards(1) | {"context_parallel_size": 2},
    "EP2": rewards(1) | {"expert_model_parallel_size": 2},
    "TP2": TP2 | rewards(2),
}
# CI runs each kind of layout of a reward model once. The others are in the slow tier.
CHOSEN = {name: LAYOUTS[name] for name in list(LAYOUTS)[:3]}
THIRDS: dict[str, Any] = rewards(2) | {"micro_batch_size": 2}
"""A layout of three ranks that all train; two of them hold the reward models."""


def make_options(place: Path) -> GrpoArgs:
    """Return the options of a run with a function and two reward models; one of them has experts, another tokenizer and
    another chat template.
    """
    policy = make_tiny_hf(place / "policy", "qwen3_moe", depth=1, with_tokenizer=True, **SIZES)
    first = make_reward_model(place / "first", **SIZES)
    second = make_reward_model(place / "second", "qwen3_moe", seed=1, **SIZES)
    tokenizer = make_tiny_tokenizer(290)
    tokenizer.chat_template = "{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}\n{% endfor %}"
    tokenizer.save_pretrained(second)
    return policy_options(policy, place)(
        reward_funcs=["length"],
        reward_model=[str(first), str(second)],
        reward_weights=WEIGHTS,
        train_iters=2,
    )


def expected_scores(args: GrpoArgs, generation: Generation) -> np.ndarray:
    """Return transformers' scores of the completions by both reward models, [completions, 2]."""
    decode = partial(AutoTokenizer.from_pretrained(args.model).decode, skip_special_tokens=True)
    turns = []
    for prompt, completion in zip(generation.prompts(), generation.completions(), strict=True):
        (query,) = re.findall("What is .*", str(decode(prompt)))
        answer = {"role": "assistant", "content": str(decode(completion))}
        turns.append([{"role": "user", "content": query}, answer])
    return np.stack([hf_scores(Path(directory), turns).numpy() for directory in args.reward_model], axis=1)


def check_scores(args: GrpoArgs) -> None:
    files = sorted((Path(args.output_dir) / "rollouts").glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        generation = Generation.load(file)
        assert generation.scores.shape == (args.global_batch_size, 3)
        expected = expected_scores(args, generation)
        assert expected.std(axis=0).min() > 1e-3  # more than the tolerance
        np.testing.assert_allclose(generation.scores[:, 1:], expected, rtol=0, atol=1e-5, err_msg=str(file))
        found = compute_advantages(generation.scores, AdvantageSettings(NUM_GENERATIONS, weights=tuple(WEIGHTS)))
        np.testing.assert_array_equal(generation.advantages, found.advantages)


def run_and_check(args: GrpoArgs, layouts: dict[str, dict[str, Any]], num_processes: int) -> None:
    place = Path(args.output_dir)
    jobs = [replace(args, output_dir=str(place / name), **layout) for name, layout in layouts.items()]
    start(num_processes, run_all, jobs, num_processes)
    for job in jobs:
        check_scores(job)


@pytest.mark.parametrize(
    "layouts",
    [pytest.param(CHOSEN, id="chosen"), pytest.param(LAYOUTS, id="all", marks=pytest.mark.slow)],
)
def test_scores_are_transformers_in_each_layout(tmp_path, layouts):
    args = make_options(tmp_path)
    run_and_check(args, layouts, 2)
    if layouts is LAYOUTS:
        run_and_check(args, {"DP3, reward models TP2": THIRDS}, 3)
