"""Test that every fixed part of megatron-core is defective without its fix."""

import importlib
from typing import Any

import pytest
import torch
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import local_multi_tensor_l2_norm
from torch.utils._python_dispatch import TorchDispatchMode

from swiftlite.runtime import cpu, megatron_fixes


def route() -> torch.Tensor:
    return moe_utils.router_gating_linear(torch.ones(3, 2), torch.ones(4, 2), None, torch.float32)


@pytest.mark.skipif(moe_utils.HAVE_TE, reason="Transformer Engine brings the function")
def test_te_general_gemm(monkeypatch):
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    with pytest.raises(NameError, match="te_general_gemm"):
        route()
    megatron_fixes.install()
    assert torch.equal(route(), torch.full((3, 4), 2.0))
    megatron_fixes.install()
    assert moe_utils.te_general_gemm is None


class CountsOperations(TorchDispatchMode):
    """Counts operations, and numbers that the host reads from tensors.

    On a GPU, the host waits for each of these numbers.
    """

    def __init__(self):
        super().__init__()
        self.num_operations = self.num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not hasattr(transformer_block, "checkpointed_forward"), reason="a method until megatron-core 0.17")
def test_a_block_recomputes_by_its_own_method(monkeypatch):
    class Block(torch.nn.Module):
        def _checkpointed_forward(self, **inputs):
            return inputs

    module: Any = transformer_block  # the function is not there in every release
    stock = importlib.import_module("megatron.core.recompute").checkpointed_forward
    monkeypatch.setattr(transformer_block, "checkpointed_forward", stock)
    with pytest.raises(TypeError):
        module.checkpointed_forward(Block(), hidden_states=1)
    megatron_fixes.install()
    assert module.checkpointed_forward(Block(), hidden_states=1) == {"hidden_states": 1}
    monkeypatch.delattr(Block, "_checkpointed_forward")
    with pytest.raises(TypeError):
        module.checkpointed_forward(Block(), hidden_states=1)


WITH_KERNELS = clip_grads.l2_norm_impl.__module__.startswith(("transformer", "apex"))


def test_master_weights_are_copied_together(monkeypatch):
    def copy() -> tuple[list[torch.Tensor], int]:
        masters = [torch.arange(n + 0.3) for n in range(1, 4)]
        weights = [torch.zeros(len(master), dtype=torch.bfloat16) for master in masters]
        with CountsOperations() as counted:
            optimizer._multi_tensor_copy_this_to_that(masters, weights)
        return weights, counted.num_operations

    monkeypatch.setattr(optimizer, "_multi_tensor_copy_this_to_that", megatron_fixes.STOCK_COPY)
    expected, num_operations = copy()
    assert num_operations == 3
    megatron_fixes.install()
    weights, num_operations = copy()
    assert num_operations == 1
    for ours, stock in zip(weights, expected, strict=True):
        assert torch.equal(ours, stock)
    optimizer._multi_tensor_copy_this_to_that([], [])  # a rank without parameters


@pytest.mark.skipif(WITH_KERNELS, reason="Transformer Engine or Apex brings kernels for many tensors")
def test_a_norm_of_many_gradients_waits_once(monkeypatch):
    """The norm is bitwise identical to megatron-core's.

    The host reads one number, and no gradient has a separate launch.
    """
    cpu.install()
    gradients = [torch.randn(3 + size % 5, 7) for size in range(40)]
    gradients.append(gradients[0].clone())

    def norm() -> tuple[float, CountsOperations]:
        with CountsOperations() as counted:
            return clip_grads.get_grad_norm_fp32(gradients, grad_stats_parallel_group=None), counted

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **options: None)  # of one rank
    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    stock, counted = norm()
    assert counted.num_operations > len(gradients)
    megatron_fixes.install()
    ours, counted = norm()
    assert counted.num_operations < 20
    assert counted.num_reads == 1
    assert ours == stock
    exact = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
    assert ours == pytest.approx(float(exact), rel=1e-6)  # a few roundings of float32
