"""torch's own varlen_attn as `--attention_backend flash` calls it, over kernels in plain torch for the two operations
that only CUDA has: packed rows are what one call of scaled_dot_product_attention for each sequence makes of them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swiftlite.model.context_parallel import causal_segments
from swiftlite.model.kernels import varlen_kernel
from swiftlite.plan.kernels import Kernels
from tests.model.test_attention import SHAPES, make_attention, make_inputs


def sequences(query, key, value, cu_q, cu_k) -> Iterator[tuple[torch.Tensor, ...]]:
    """Of each sequence queries, keys and values [heads, S, size] in float32, keys repeated for their queries."""
    for ends in zip(cu_q.tolist(), cu_q[1:].tolist(), cu_k.tolist(), cu_k[1:].tolist(), strict=False):
        q, k, v = query[ends[0] : ends[1]], key[ends[2] : ends[3]], value[ends[2] : ends[3]]
        repeats = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        yield tuple(t.float().transpose(0, 1) for t in (q, k, v))


def probabilities(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    allowed = torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril(k.size(1) - q.size(1))
    return (q @ k.mT * scale).masked_fill(~allowed, float("-inf")).softmax(-1)


def forward(query, key, value, cu_q, cu_k, *others: Any, scale: float, **options: Any):
    parts = [probabilities(q, k, scale) @ v for q, k, v in sequences(query, key, value, cu_q, cu_k)]
    out = torch.cat([part.transpose(0, 1) for part in parts]).to(query.dtype)
    seed = torch.zeros(2, dtype=torch.uint64)
    return out, torch.zeros(query.size(1), len(query)), seed, seed[:0], query.new_zeros(0)


def backward(grad, query, key, value, out, sums, cu_q, cu_k, *others: Any, scale: float, **options: Any):
    grads: list[list[torch.Tensor]] = [[], [], []]
    grad_parts = grad.float().split(cu_q.diff().tolist())
    for (q, k, v), of_out in zip(sequences(query, key, value, cu_q, cu_k), grad_parts, strict=True):
        p, g = probabilities(q, k, scale), of_out.transpose(0, 1)
        of_p = g @ v.mT
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * scale
        for place, part in zip(grads, (of_scores @ k, of_scores.mT @ q, p.mT @ g), strict=True):
            place.append(part.transpose(0, 1))
    of_query, of_key, of_value = map(torch.cat, grads)
    groups = key.size(1)
    of_key, of_value = (t.unflatten(1, (groups, -1)).sum(2) for t in (of_key, of_value))
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_packed_rows_are_computed_as_sequence_by_sequence(mesh, shape, rank, size):
    attention = make_attention(
        mesh, k_channels=SHAPES[shape][2], varlen=varlen_kernel(Kernels("local", "torch_varlen"))
    )
    _, key, value = make_inputs(48, shape, torch.bfloat16, 1)
    query, *_ = make_inputs(48 // size, shape, torch.bfloat16, 1)
    segments = causal_segments((16, 8, 24), rank, size)
    results = []
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        for attend in (attention._attend_varlen, attention._attend_segments):
            out = attend(query, key, value, segments)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), (query, key, value))])
    for ours, expected in zip(*results, strict=True):
        # bfloat16 has 8 bits: 2 ** -8 of the largest number for each of a few roundings.
        torch.testing.assert_close(ours, expected, rtol=0, atol=0.02 * expected.abs().max().item())
