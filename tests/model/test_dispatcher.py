"""Test that tokens are sent to experts and back on one rank as megatron-core's dispatcher does."""

from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

from swiftlite.model.layers.dispatcher import LocalTokenDispatcher
from swiftlite.runtime.compat import MCORE_VERSION
from tests.model.test_logits import load_megatron
from tests.tiny import make_tiny_hf

NUM_EXPERTS, TOPK, HIDDEN = 7, 3, 10


@pytest.fixture
def layer(tmp_path, mesh) -> Any:
    model = load_megatron(make_tiny_hf(tmp_path, "qwen3_moe"), mesh, torch.float32)
    layer: Any = model.decoder.layers[0].mlp
    layer.config.moe_router_topk = TOPK
    layer.config.num_moe_experts = NUM_EXPERTS
    return layer


def route(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a routing map and weights. Expert 3 has no token, expert 0 has all tokens, and weights may be 0."""
    generator = torch.Generator().manual_seed(num_tokens)
    score_TE = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    score_TE[:, 3], score_TE[:, 0] = -1, 2
    score_TE[-1] = score_TE[0]
    map_TE = torch.zeros(num_tokens, NUM_EXPERTS, dtype=torch.bool).scatter(1, score_TE.topk(TOPK).indices, True)
    probs_TE = score_TE.masked_fill(~map_TE, 0).to(dtype)
    probs_TE[0, 0] = 0
    return map_TE, probs_TE.requires_grad_()


def run(dispatcher: Any, num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Run a dispatcher with experts that multiply by their number; return the results of every step, and gradients."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randn(num_tokens, 1, HIDDEN, generator=generator).to(dtype).requires_grad_()
    map_TE, probs_TE = route(num_tokens, dtype)
    dispatched = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(tokens, map_TE, probs_TE))
    hidden, counts, probs = dispatcher.dispatch_postprocess(*dispatched)
    expert_P = torch.arange(NUM_EXPERTS).repeat_interleave(counts)
    outputs = hidden * ((1 + expert_P) * probs)[:, None].to(dtype)
    out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(outputs)))
    gradients = torch.autograd.grad(out, (tokens, probs_TE), torch.randn(out.shape, generator=generator).to(dtype))
    return [hidden.detach(), torch.as_tensor(counts), probs.detach(), out.detach(), *gradients]


def both(layer: Any) -> tuple[Any, Any]:
    ours = layer.token_dispatcher
    assert isinstance(ours, LocalTokenDispatcher)
    groups = ProcessGroupCollection(ep=ours.ep_group, expt_tp=ours.tp_group, tp_ep=ours.tp_ep_group)
    stock = MoEAlltoAllTokenDispatcher(NUM_EXPERTS, list(range(NUM_EXPERTS)), layer.config, groups)
    return ours, stock


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_it_is_megatron_cores_to_the_last_bit(num_tokens, layer):
    """Order of tokens, counts, weights, sums and gradients are compared in float32."""
    ours, stock = both(layer)
    found, expected = (run(dispatcher, num_tokens, torch.float32) for dispatcher in (ours, stock))
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


class Waits(TorchDispatchMode):
    """Collects operations whose result size the host must read, and numbers that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_the_host_reads_nothing(layer):
    ours, stock = both(layer)
    checked = [(ours, False)]
    if Version("0.17") > MCORE_VERSION:
        checked.append((stock, True))
    for dispatcher, waits in checked:
        map_TE, probs_TE = route(9, torch.float32)
        with Waits() as found:
            dispatched = dispatcher.dispatch_preprocess(torch.randn(9, 1, HIDDEN), map_TE, probs_TE)
            hidden, *_ = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*dispatched))
            dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(hidden)))
        assert bool(found.names) is waits
