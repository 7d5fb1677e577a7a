"""Test attention sinks: in dense and packed rows, with kernels and without, with windows, in decoding and in drafts."""

from typing import Any

import pytest
import torch

from swiftlite.model.attention import attention as attention_module
from swiftlite.model.attention import sinks as sinks_module
from swiftlite.model.attention.cache import Cache, Span
from swiftlite.model.attention.draft_attention import Draft, DraftAttention
from swiftlite.model.attention.merged_attention import PrefixKernel
from swiftlite.model.context_parallel import causal_segments
from tests import flash_stand_ins
from tests.model.test_attention import LENGTHS, make_attention, make_inputs, make_packed, split

WINDOW = 6
SINKS = torch.tensor([-3.0, 0.0, 2.5, 30.0])
# float64: sums of 40 terms of about 1.
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-13}


def as_kernel() -> PrefixKernel:
    """Return a kernel for packed rows that supports windows and any precision."""

    def left(window: int | None) -> int:
        return -1 if window is None else window - 1

    def forward(query, key, value, cu_q, cu_k, longest_q, longest_k, scale, window=None):
        return flash_stand_ins.forward(query, key, value, cu_q, cu_k, scale, left(window))

    def backward(grad, query, key, value, out, lse, cu_q, cu_k, longest_q, longest_k, scale, window=None):
        grads = flash_stand_ins.backward(grad, query, key, value, out, lse, cu_q, cu_k, scale, left(window))
        return grads[0], grads[1], grads[2]

    return PrefixKernel(forward, backward)


def with_sinks(mesh, kernel: str, attention: type = attention_module.CoreAttention, **options) -> Any:
    if kernel != "none":
        options |= {"varlen": pytest.fail, "prefix": as_kernel()}  # only the kernel with a log-sum-exp is called
    made: Any = make_attention(mesh, attention, has_sinks=True, **options).double()
    made.softmax_offset.data = SINKS.double()
    return made


def written_out(query: Any, key: Any, value: Any, sinks: Any, window: int | None = None) -> torch.Tensor:
    """Compute causal attention of one sequence [S, heads, size] by its definition."""
    repeats = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qnd,knd->nqk", query, key) * query.size(-1) ** -0.5
    is_seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    if window is not None:
        is_seen = is_seen.triu(1 - window)
    scores = scores.masked_fill(~is_seen, float("-inf"))
    shares = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:2], 1)], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("nqk,knd->qnd", shares, value).flatten(1)


def assert_equal(found, expected, inputs) -> None:
    """Check a result, and the gradients of the inputs and of the sinks."""
    torch.testing.assert_close(found, expected, **EXACT)
    weight = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    gradients = [torch.autograd.grad(output, inputs, weight, retain_graph=True) for output in (found, expected)]
    for ours, its in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, its, **EXACT)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("kernel", ["none", "all segments"])
def test_packed_and_dense_rows(mesh, monkeypatch, kernel, window):
    monkeypatch.setattr(attention_module, "MAX_QUERIES", 16)  # blocks of a long sequence with a window
    attention = with_sinks(mesh, kernel, window=window)
    inputs = [*make_inputs(sum(LENGTHS), "gqa", torch.float64), attention.softmax_offset]
    parts = [written_out(q, k, v, inputs[3], window) for q, k, v in split(inputs[:3])]
    expected = torch.cat(parts)
    assert_equal(attention(*inputs[:3], None, packed_seq_params=make_packed(LENGTHS)), expected, inputs)

    query, key, value = (torch.stack([tensor, tensor.flip(0)], dim=1) for tensor in inputs[:3])
    parts = [written_out(query[:, row], key[:, row], value[:, row], inputs[3], window) for row in (0, 1)]
    assert_equal(attention(query, key, value, None), torch.stack(parts, dim=1), inputs)


@pytest.mark.parametrize("way", ["together", "in slices"])
def test_rows_that_two_ranks_share(mesh, monkeypatch, way):
    monkeypatch.setattr(attention_module, "LONG", 1 if way == "in slices" else 2048)
    attention = with_sinks(mesh, "all segments")
    query, key, value = (tensor[:, None] for tensor in make_inputs(16, "gqa", torch.float64))
    whole = written_out(query[:, 0], key[:, 0], value[:, 0], attention.softmax_offset)
    for rank, own in enumerate(((0, 1, 2, 3, 12, 13, 14, 15), range(4, 12))):
        found = attention._attend_row(query[list(own)], key, value, causal_segments((16,), rank, 2))
        inputs = [attention.softmax_offset]
        assert_equal(found[:, 0].flatten(1), whole[list(own)], inputs)


def test_a_mask(mesh):
    attention = with_sinks(mesh, "none")
    query, key, value = make_inputs(12, "gqa", torch.float64, rows=1)
    masked = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    masked[..., 0] = True
    masked[..., 0, 0] = False
    found = attention(query, key, value, masked)[1:, 0]
    expected = written_out(query[1:, 0], key[1:, 0], value[1:, 0], attention.softmax_offset)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("kernel", ["none", "all segments"])
def test_decoding(mesh, kernel, window):
    """Rows of 5 and 9 tokens, then one token each, and then one token of the second row."""
    attention = with_sinks(mesh, kernel, window=window)
    query, key, value = make_inputs(17, "gqa", torch.float64)
    rows = [[0, 1, 2, 3, 4, 14], [5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16]]
    passes = [
        ([Span(0, 0, 5), Span(1, 0, 9)], range(14)),
        ([Span(0, 5, 6), Span(1, 9, 10)], [14, 15]),
        ([Span(1, 10, 11)], [16]),
    ]
    cache = Cache(2, 16, torch.device("cpu"))
    parts = []
    with torch.no_grad():
        for spans, tokens in passes:
            cache.begin(spans)
            new = (tensor[list(tokens)][:, None] for tensor in (query, key, value))
            parts.append(attention(*new, cache)[:, 0])
        found = torch.cat(parts)
        for row in rows:
            expected = written_out(query[row], key[row], value[row], attention.softmax_offset, window)
            torch.testing.assert_close(found[row], expected, **EXACT)


def test_unrolled_drafts(mesh):
    """The kernel and the mask compute the same, in all steps."""
    results = []
    for kernel in ("none", "all segments"):
        attention = with_sinks(mesh, kernel, DraftAttention)
        draft, outs = Draft(), []
        for step in range(3):
            inputs = (tensor + step for tensor in make_inputs(12, "gqa", torch.float64, rows=2))
            outs.append(attention(*inputs, draft))
        out = torch.stack(outs)
        (gradient,) = torch.autograd.grad(out.square().sum(), [attention.softmax_offset])
        results.append((out, gradient))
    (out, gradient), (expected, its_gradient) = results
    torch.testing.assert_close(out, expected, **EXACT)
    torch.testing.assert_close(gradient, its_gradient, rtol=1e-12, atol=0)


def test_the_form_for_gpus_without_kernels(mesh):
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in make_inputs(12, "gqa", torch.float32, rows=2))
    found = sinks_module._plain(query, key, value, SINKS, None, 0.25)
    expected = sinks_module.attend_with_sinks(query, key, value, SINKS, None, 0.25)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)  # float32: sums of 12 terms of about 1
