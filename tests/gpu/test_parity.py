"""Test the parity table on GPUs: layouts that gloo cannot run, and recomputation in bfloat16 on one GPU.

`python scripts/parity.py --device cuda --dtype bfloat16` prints the table of one GPU.
"""

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel import parity
from tests.parallel.parity import CASES, TP2_SP, Job

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="no CUDA device")
@pytest.mark.parametrize("family", ["qwen3", "glm4_moe", "deepseek_v3"])
def test_recomputation_in_bfloat16_changes_no_loss(tmp_path, family):
    hf_dir = parity.make_model(tmp_path / "model", family)
    names = ("full uniform 1", "full uniform 2", "full block 1", "selective")
    options = {"torch_dtype": "bfloat16"}
    jobs = [Job(hf_dir, tmp_path / "alone", options)]
    jobs += [Job(hf_dir, tmp_path / name, options | CASES[name].options) for name in names]
    alone, *others = parity.run(1, jobs)
    for other in others:
        # The forward pass of the first step is the same computation; backward kernels may sum atomically.
        losses = [name for name in alone.metrics[0] if name.endswith("loss")]
        assert {name: other.metrics[0][name] for name in losses} == {name: alone.metrics[0][name] for name in losses}


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="4 GPUs")
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_experts_shared_both_ways(tmp_path, family):
    """megatron-core's all-to-all with expert and expert tensor parallelism gathers lists of unequal length, which gloo
    cannot.
    """
    hf_dir = parity.make_model(tmp_path / "model", family)
    both = TP2_SP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    (alone,) = parity.run(1, [Job(hf_dir, tmp_path / "alone")])
    (shared,) = parity.run(4, [Job(hf_dir, tmp_path / "shared", both)])
    found = parity.compare(alone, shared, load_file(hf_dir / "model.safetensors"))
    assert [name for name, bound in parity.BOUNDS.items() if not found[name] <= bound] == [], found
