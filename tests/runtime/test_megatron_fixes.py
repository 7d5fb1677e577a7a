"""Every mended part of megatron-core is broken without its fix."""

import importlib
from typing import Any

import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import local_multi_tensor_scale
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swiftlite.runtime import megatron_fixes


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


class CountsCopies(TorchDispatchMode):
    """Counts results that are none of the arguments."""

    def __init__(self):
        super().__init__()
        self.num_copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        self.num_copies += id(result) not in known
        return result


@pytest.mark.skipif(clip_grads.multi_tensor_scale_impl.__module__.startswith(("transformer", "apex")), reason="theirs")
def test_gradients_are_clipped_without_a_copy(monkeypatch):
    def clip() -> tuple[torch.Tensor, int]:
        flag, gradient = torch.zeros(1), torch.arange(6.0)
        with CountsCopies() as counted:
            clip_grads.multi_tensor_scale_impl(0, flag, [[gradient], [gradient]], 0.3)
        return gradient, counted.num_copies

    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", local_multi_tensor_scale)
    expected, num_copies = clip()
    assert num_copies == 1
    megatron_fixes.install()
    clipped, num_copies = clip()
    assert num_copies == 0
    assert torch.equal(clipped, expected)
