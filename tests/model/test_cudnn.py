"""Test the attention that asks cuDNN first: rounded lengths, and results on a CPU, where torch takes another one."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from swiftlite.model.attention import attention as attention_module
from swiftlite.model.attention import cudnn
from tests.model.test_attention import make_attention, make_inputs, make_packed

# Other blocks of keys: roundings of numbers of about 1. A wrong key changes the first digit.
BOUND = {"rtol": 0, "atol": 4e-6}


@pytest.fixture
def asked(monkeypatch) -> list[tuple[tuple[int, ...], SDPBackend]]:
    """Return the shape of the queries and the backend that torch prefers, for each call of its attention."""
    calls = []
    attend = F.scaled_dot_product_attention

    def recorded(query, *args, **kwargs):
        first = SDPBackend(torch._C._get_sdp_priority_order()[0])  # type: ignore[attr-defined]
        calls.append((tuple(query.shape), first))
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    return calls


@pytest.fixture
def short(monkeypatch) -> None:
    """Let sequences of 16 tokens count as long."""
    monkeypatch.setattr(cudnn, "LEAST", 16)
    monkeypatch.setattr(attention_module, "LONG", 16)


def test_lengths_are_rounded_to_sixteen_per_doubling():
    rounded = [cudnn.rounded(length) for length in range(1, 2**15 + 1)]
    assert all(length <= to for length, to in enumerate(rounded, start=1))
    assert cudnn.rounded(4096) == 4096
    assert cudnn.rounded(4097) == 4352
    for octave in (2**11, 2**12, 2**13):
        assert len(set(rounded[octave - 1 : 2 * octave - 1])) == 17  # both ends included
    waste = max(to / length for length, to in enumerate(rounded[2047:], start=2048))
    assert waste < 17 / 16


@pytest.mark.parametrize("shape", ["mha", "gqa"])
@pytest.mark.parametrize("lengths", [None, [40, 17, 130, 16]], ids=["dense", "packed"])
def test_results_and_gradients_are_those_without_it(mesh, short, asked, shape, lengths):
    inputs = make_inputs(sum(lengths) if lengths else 45, shape, rows=None if lengths else 2)
    packed = make_packed(lengths) if lengths else None
    expected = make_attention(mesh)(*inputs, None, packed_seq_params=packed)
    plain = len(asked)
    ours = make_attention(mesh, prefers_cudnn=True)(*inputs, None, packed_seq_params=packed)
    torch.testing.assert_close(ours, expected, **BOUND)
    weight = torch.randn_like(ours)
    pairs = zip(torch.autograd.grad(ours, inputs, weight), torch.autograd.grad(expected, inputs, weight), strict=True)
    for our_gradient, gradient in pairs:
        torch.testing.assert_close(our_gradient, gradient, **BOUND)
    assert {backend for _, backend in asked[plain:]} == {SDPBackend.CUDNN_ATTENTION}
    assert {shape[2] for shape, _ in asked[plain:]} <= {128, 256}


def test_short_sequences_windows_and_masks_do_not_ask_for_it(mesh, short, asked):
    attention = make_attention(mesh, prefers_cudnn=True)
    attention(*make_inputs(24, "gqa"), None, packed_seq_params=make_packed([3] * 8))
    attention(*make_inputs(15, "gqa", rows=2), None)
    mask = torch.ones(1, 1, 24, 24, dtype=torch.bool).triu(1)
    attention(*make_inputs(24, "gqa", rows=2), mask)
    make_attention(mesh, prefers_cudnn=True, window=8)(*make_inputs(24, "gqa", rows=2), None)
    assert asked
    assert SDPBackend.CUDNN_ATTENTION not in [backend for _, backend in asked]


def test_the_number_of_shapes_of_a_run_is_bounded(mesh, short, asked):
    attention = make_attention(mesh, prefers_cudnn=True)
    for length, rows in itertools.product(range(128, 256, 9), (1,)):
        attention(*make_inputs(length, "gqa", rows=rows), None)
    assert len({shape for shape, _ in asked}) == 2
