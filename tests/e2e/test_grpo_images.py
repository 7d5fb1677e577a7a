"""Test `megatron grpo` on rows with images with real vLLM, which gets new weights of trunk, tower and heads."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from swiftlite.rollouts.generation import Generation
from tests.e2e.test_image_requests import torchvision  # noqa: F401, a fixture
from tests.images import add_processors_of_engines, make_vision_hf_with_tokenizer
from tests.tiny import VLLM_LINEAR_SIZES
from tests.train.test_grpo_images import REWARDS, write_rows

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.slow,
]
NUM_GENERATIONS = 3
CASES: dict[str, dict[str, Any]] = {
    # Both compute in float32, with sums in different orders.
    "qwen3_vl": {"depth": 0, "torch_dtype": "float32", "largest": 5e-5, "mean": 1e-5, "sizes": {}},
    # vLLM's linear attention on a CPU requires bfloat16, in which states are rounded to 8 bits.
    "qwen3_5": {"depth": 1, "torch_dtype": "bfloat16", "largest": 0.3, "mean": 0.03, "sizes": VLLM_LINEAR_SIZES},
}


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("family", CASES)
def test_probabilities_of_the_engine_are_those_of_the_trainer(tmp_path, family):
    """The learning rate changes the policy so much that old weights, or cached outputs of the tower, are noticed."""
    case = CASES[family]
    model = make_vision_hf_with_tokenizer(tmp_path / "model", family, case["depth"], **case["sizes"])
    add_processors_of_engines(model, family)
    rows = write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rewards.py").write_text(REWARDS)
    words = (
        f"megatron grpo --model {model} --dataset {rows} --reward_funcs even --infer_backend vllm "
        f"--external_plugins {tmp_path / 'rewards.py'} --torch_dtype {case['torch_dtype']} --num_generations 4 "
        "--global_batch_size 12 --micro_batch_size 4 --max_completion_length 12 --max_length 128 --lr 0.02 "
        "--lr_warmup_fraction 0 --steps_per_generation 2 --freeze_vit false --freeze_aligner false "
        f"--train_iters {2 * NUM_GENERATIONS} --split_dataset_ratio 0 --acceptance_samples 0 --report_to none "
        f"--output_dir {tmp_path / 'run'}"
    )
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "swiftlite", *words.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-5000:]
    generations = [Generation.load(path) for path in sorted((tmp_path / "run" / "rollouts").glob("*.safetensors"))]
    assert len(generations) == NUM_GENERATIONS
    for generation in generations:
        assert {len(images) for images in generation.images} == {0, 1, 2}
        error = np.abs(generation.engine_log_p - generation.old_log_p)
        assert error.max() < case["largest"]
        assert error.mean() < case["mean"]
        assert set(generation.draft_depths.tolist()) <= {0, 1}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"rollout/acceptance_1" in line for line in lines} == {case["depth"] > 0}
