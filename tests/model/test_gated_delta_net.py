"""Test the layers of the gated delta rule and of Mamba-2: separate rows, decoding token by token, and float32
parameters.

test_logits.py compares its outputs with transformers.
"""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.spec_utils import build_module

from swiftlite.families.linear_attention import GatedDeltaNet as Sizes
from swiftlite.families.mamba import Mamba2
from swiftlite.model.attention.cache import Cache, Span
from swiftlite.model.attention.recurrent import RecurrentAttention, causal_conv1d
from swiftlite.model.build import build_config
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.specs import attention_spec

KINDS = {
    "delta rule": Sizes(hidden=32, key_heads=2, value_heads=4, key_head_dim=8, value_head_dim=12, kernel=4),
    "Mamba-2": Mamba2(hidden=32, heads=4, head_dim=12, groups=2, state=8, kernel=4),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
CONFIG = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "activation_func": "silu",
    "add_bias_linear": False,
    "layernorm_epsilon": 1e-6,
    "normalization": "RMSNorm",
}


def make_layer(mesh, kind, dtype=torch.float32) -> RecurrentAttention:
    config = build_config(CONFIG, device=mesh.device, dtype=dtype, mtp_num_layers=0)
    layer = build_module(attention_spec(KINDS[kind]), config=config, layer_number=1, pg_collection=mesh.groups)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return layer.eval()


def cu_seqlens(*lengths: int) -> torch.Tensor:
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))


@pytest.fixture
def hidden() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(90, 1, 32)


@every_kind
def test_packed_sequences_are_what_they_are_alone(mesh, hidden, kind):
    layer = make_layer(mesh, kind)
    lengths = (70, 3, 17)
    packed, _ = layer(hidden, packed_seq_params=describe_packed(cu_seqlens(*lengths)))
    alone = [layer(sequence)[0] for sequence in hidden.split(lengths)]
    # Matrix products of other sizes round otherwise.
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


@every_kind
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_other_tokens_in_a_sequence_change_no_bit_of_another(mesh, hidden, changed, kind):
    layer = make_layer(mesh, kind)
    packed = describe_packed(cu_seqlens(70, 3, 17))
    parts = list(hidden.split((70, 3, 17)))
    before, _ = layer(hidden, packed_seq_params=packed)
    parts[changed] = parts[changed] + 1
    after, _ = layer(torch.cat(parts), packed_seq_params=packed)
    same = [torch.equal(*pair) for pair in zip(before.split((70, 3, 17)), after.split((70, 3, 17)), strict=True)]
    assert same == [number != changed for number in range(3)]


@every_kind
def test_rows_side_by_side_are_what_they_are_alone(mesh, hidden, kind):
    layer = make_layer(mesh, kind)
    rows = hidden.reshape(30, 3, 32)
    together, _ = layer(rows)
    alone = [layer(rows[:, number : number + 1])[0] for number in range(3)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)


@every_kind
def test_tokens_one_by_one_are_the_whole_row(mesh, hidden, kind):
    """Two rows get different numbers of tokens in several passes. A pass can start, continue or skip a row."""
    layer = make_layer(mesh, kind)
    rows = hidden[:9], hidden[20:34]
    passes = [
        (Span(0, 0, 5), Span(1, 0, 2)),
        (Span(1, 2, 9),),
        (Span(0, 5, 6), Span(1, 9, 10)),
        (Span(1, 10, 14), Span(0, 6, 9)),
    ]
    cache = Cache(2, 20, mesh.device.torch_device)
    parts: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for spans in passes:
            cache.begin(spans)
            tokens = torch.cat([rows[span.row][span.start : span.end] for span in spans])
            padded = torch.cat([tokens, torch.zeros(3, 1, 32)])
            out, _ = layer(padded, cache)
            assert not out[len(tokens) :].any()
            for span, part in zip(spans, out[: len(tokens)].split([len(span) for span in spans]), strict=True):
                parts[span.row].append(part)
        whole = [layer(row)[0] for row in rows]
    for found, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)


@every_kind
def test_what_is_published_in_float32_stays_so(mesh, kind):
    """Float16Module casts a model with `bfloat16()`."""
    layer = make_layer(mesh, kind, torch.bfloat16)
    exact = {name: layer.get_parameter(name).detach().clone() for name in layer.exact}
    assert exact.keys() >= {"A_log", "dt_bias"}
    layer.bfloat16()
    for name, numbers in exact.items():
        assert torch.equal(layer.get_parameter(name), numbers)
        assert numbers.dtype is torch.float32
    assert layer.conv1d.weight.dtype is torch.bfloat16


def test_the_convolution_is_that_of_each_sequence():
    torch.manual_seed(0)
    inputs, weight = torch.randn(10, 5), torch.randn(5, 1, 4)
    found, before = causal_conv1d(inputs, weight, (2, 8), None)
    begin = 0
    for number, length in enumerate((2, 8)):
        alone = F.pad(inputs[begin : begin + length], (0, 0, 3, 0))
        expected = F.conv1d(alone.T[None], weight, groups=5)[0].T
        assert torch.equal(found[begin : begin + length], expected)
        assert torch.equal(before[number], alone[-3:])
        begin += length
