"""Test core attention on one process: packed rows against each sequence alone, and against a plain softmax."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.model.attention.attention import CoreAttention, for_each_query_head
from swiftlite.model.attention.head_size import fill_values
from swiftlite.model.context_parallel import causal_segments
from swiftlite.runtime.mesh import Mesh
from tests.messages import naming

LENGTHS = [5, 1, 16, 40, 7]
# query heads, key-value heads, head size of queries and keys, of values
SHAPES = {"mha": (4, 4, 16, 16), "gqa": (4, 2, 16, 16), "mla": (4, 4, 24, 16)}


def make_attention(mesh: Mesh, attention: type = CoreAttention, k_channels: int = 16, **options):
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, attention_dropout=0.0, masked_softmax_fusion=False
    )
    channels = {"k_channels": k_channels} if attention is CoreAttention else {}
    return attention(config, 1, AttnMaskType.causal, "self", pg_collection=mesh.groups, **channels, **options)


def make_packed(lengths: list[int], **fields) -> PackedSeqParams:
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, **fields)


def make_inputs(tokens: int, shape: str, dtype: torch.dtype = torch.float32, rows: int | None = None):
    """Return queries, keys and values: [T, heads, size], or [S, rows, heads, size]."""
    torch.manual_seed(0)
    num_heads, num_groups, k_size, v_size = SHAPES[shape]
    lead = (tokens,) if rows is None else (tokens, rows)
    sizes = [(num_heads, k_size), (num_groups, k_size), (num_groups, v_size)]
    return [torch.randn(*lead, *size, dtype=dtype, requires_grad=True) for size in sizes]


def split(inputs):
    """Return queries, keys and values of each sequence."""
    return zip(*(tensor.split(LENGTHS) for tensor in inputs), strict=True)


def written_out(query, key, value):
    """Compute causal attention of one sequence [S, heads, size] by its definition."""
    repeats = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qnd,knd->nqk", query, key) * query.size(-1) ** -0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("nqk,knd->qnd", scores.masked_fill(future, float("-inf")).softmax(-1), value).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_sequence_is_computed_as_alone(mesh, shape, dtype):
    attention = make_attention(mesh, k_channels=SHAPES[shape][2])
    inputs = make_inputs(sum(LENGTHS), shape, dtype)
    packed = attention(*inputs, None, packed_seq_params=make_packed(LENGTHS))
    assert packed.shape == (sum(LENGTHS), SHAPES[shape][0] * SHAPES[shape][3])
    alone = torch.cat([attention(*(t[:, None] for t in sequence), None)[:, 0] for sequence in split(inputs)])
    assert torch.equal(packed, alone)
    weight = torch.randn_like(packed)
    for ours, expected in zip(
        torch.autograd.grad(packed, inputs, weight), torch.autograd.grad(alone, inputs, weight), strict=True
    ):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_what_the_paper_says(mesh, shape):
    attention = make_attention(mesh, k_channels=SHAPES[shape][2])
    inputs = make_inputs(sum(LENGTHS), shape, torch.float64)
    packed = attention(*inputs, None, packed_seq_params=make_packed(LENGTHS))
    expected = torch.cat([written_out(*sequence) for sequence in split(inputs)])
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-13)  # float64: sums of 40 terms of about 1
    dense = attention(*(t[:, None] for t in inputs), None)[:, 0]
    torch.testing.assert_close(dense, written_out(*inputs), rtol=0, atol=1e-13)


def varlen(query, key, value, cu_q, cu_k, max_q, max_k, *, scale):
    """Compute what CUDA's kernels compute: causal attention of each sequence, with equal head sizes.

    The causal mask is aligned to the lower right.
    """
    assert query.size(-1) == key.size(-1) == value.size(-1)
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max())
    outs = []
    for q, k, v in zip(
        *(t.split(cu.diff().tolist()) for t, cu in ((query, cu_q), (key, cu_k), (value, cu_k))), strict=True
    ):
        allowed = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
@pytest.mark.parametrize("rows", [1, 2])
def test_one_call_over_all_segments_is_a_call_for_each(mesh, shape, rank, size, rows):
    """Check the arguments that are passed to CUDA's kernels, without these kernels. tests/gpu/test_attention.py runs
    the kernels.
    """
    attention = make_attention(mesh, k_channels=SHAPES[shape][2], varlen=fill_values(varlen))
    _, key, value = make_inputs(48, shape, torch.float64, rows)
    query, *_ = make_inputs(48 // size, shape, torch.float64, rows)
    segments = causal_segments((16, 0, 8, 24), rank, size)
    together = attention._attend_varlen(query, key, value, segments)
    apart = attention._attend_segments(query, key, value, segments)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-14)


def test_padded_lengths_count(mesh):
    """The row contains padded sequences, so the starts of sequences follow only from the padded lengths."""
    attention = make_attention(mesh)
    inputs = make_inputs(24, "gqa")
    padded = make_packed([8, 16])
    unpadded = make_packed([5, 13], cu_seqlens_q_padded=padded.cu_seqlens_q, cu_seqlens_kv_padded=padded.cu_seqlens_q)
    ours = attention(*inputs, None, packed_seq_params=unpadded)
    assert torch.equal(ours, attention(*inputs, None, packed_seq_params=padded))


def test_an_empty_sequence_is_no_sequence(mesh):
    attention = make_attention(mesh)
    inputs = make_inputs(12, "gqa")
    ours = attention(*inputs, None, packed_seq_params=make_packed([4, 0, 8, 0]))
    assert torch.equal(ours, attention(*inputs, None, packed_seq_params=make_packed([4, 8])))


def test_a_mask_forbids(mesh):
    attention = make_attention(mesh)
    inputs = make_inputs(6, "gqa", rows=2)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)[None, None]
    # The same numbers by the masked kernel, which sums in another order: float32 rounding.
    torch.testing.assert_close(attention(*inputs, mask), attention(*inputs, None), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=naming("attention_mask")):
        attention(*make_inputs(6, "gqa"), mask, packed_seq_params=make_packed([6]))


def test_sequences_that_are_not_the_row(mesh):
    with pytest.raises(ValueError, match=naming("cu_seqlens 5 1 6")):
        make_attention(mesh)(*make_inputs(6, "gqa"), None, packed_seq_params=make_packed([2, 3]))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_keys_repeated_for_query_heads_are_those_that_grouped_heads_share(groups):
    query, key, value = (torch.randn(2, heads, 9, 16) for heads in (4, groups, groups))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    key, value = (for_each_query_head(tensor, 4) for tensor in (key, value))
    assert torch.equal(F.scaled_dot_product_attention(query, key, value, is_causal=True), expected)
