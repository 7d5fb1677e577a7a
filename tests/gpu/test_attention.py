"""Test core attention on CUDA: the variable-length kernel against one call per sequence."""

import pytest
import torch

from swiftlite.model.context_parallel import causal_segments
from swiftlite.model.layers.kernels import varlen_kernel
from swiftlite.plan.kernels import automatic
from tests.model.test_attention import SHAPES, make_attention, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_the_kernel_computes_what_a_call_for_each_does(mesh, shape, rank, size):
    kernel = varlen_kernel(automatic(True, is_float32=False))
    assert kernel is not None
    attention = make_attention(mesh, k_channels=SHAPES[shape][2], varlen=kernel)
    _, key, value = (t.detach().cuda().requires_grad_() for t in make_inputs(128, shape, torch.bfloat16, 2))
    query = make_inputs(128 // size, shape, torch.bfloat16, 2)[0].detach().cuda().requires_grad_()
    segments = causal_segments((16, 8, 104), rank, size)
    results = []
    for attend in (attention._attend_varlen, attention._attend_segments):
        out = attend(query, key, value, segments)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), (query, key, value))])
    for ours, expected in zip(*results, strict=True):
        # bfloat16 has 8 bits: 2 ** -8 of the largest number for each of a few roundings.
        torch.testing.assert_close(ours, expected, rtol=0, atol=0.02 * expected.abs().max().item())
