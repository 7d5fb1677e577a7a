"""Test the attention that asks cuDNN first: rounded lengths, and results on a CPU, where torch takes another one.

Packed rows are computed by the Python code of nvidia-cudnn-frontend, with stand-ins for its kernels.
"""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from swiftlite.model.attention import attention as attention_module
from swiftlite.model.attention import cudnn
from swiftlite.runtime.distributed import session
from tests import flash_stand_ins
from tests.model.test_attention import make_attention, make_inputs, make_packed
from tests.parallel.launch import launch

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


PACKED = ([700], [1, 30, 500], [37] * 20, [128] * 4, [2048 + 100, 3])


def packed_differences() -> list[float]:
    """Return the largest difference between one call for all sequences and a call per sequence, of results and
    gradients, for each row.
    """
    library = flash_stand_ins.cudnn_on_cpu()
    found = []
    with session() as mesh:
        for lengths, dtype in itertools.product(PACKED, (torch.float32, torch.bfloat16)):
            inputs = make_inputs(sum(lengths), "gqa", dtype)
            weight = torch.randn(sum(lengths), 64, generator=torch.Generator().manual_seed(1)).to(dtype)
            results = []
            for in_one_call in (False, True):
                attention = make_attention(mesh, prefers_cudnn=in_one_call, packs_with_cudnn=in_one_call)
                out = attention(*inputs, None, packed_seq_params=make_packed(lengths))
                results.append([out, *torch.autograd.grad(out, inputs, weight)])
            expected, ours = results
            differences = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, expected, strict=True)]
            found.append(max(differences) / (2e-5 if dtype is torch.float32 else 2e-2))
    library._destroy()
    return found


@pytest.mark.gloo
@pytest.mark.skipif(bool(flash_stand_ins.missing("cudnn")), reason=flash_stand_ins.missing("cudnn") or "it is there")
def test_packed_rows_are_computed_in_one_call_as_sequence_by_sequence():
    """float32: sums in another order. bfloat16: 2^-8 of the largest number for each of a few roundings."""
    (found,) = launch(1, packed_differences)
    assert len(found) == 2 * len(PACKED)
    assert max(found) <= 1


def test_packed_rows_need_few_plans():
    """Sequences are kept, and shapes are those of few plans, with 1 to 200 sequences and up to 8,192 tokens."""
    numbers, shapes = random.Random(1), set()
    for _ in range(300):
        lengths = tuple(numbers.randint(1, 4096) for _ in range(numbers.randint(1, 200)))
        ends = [end for end in itertools.accumulate(lengths) if end <= 8192] or [lengths[0]]
        lengths = lengths[: len(ends)]
        found = cudnn.places(lengths, torch.device("cpu"))
        of_sequences = found.starts.diff().tolist()
        assert of_sequences[: len(lengths)] == list(lengths)
        assert [length for length in of_sequences[len(lengths) :] if length] == [found.added] * bool(found.added)
        assert sum(of_sequences) == cudnn.rounded(sum(lengths))
        assert max(of_sequences) <= found.longest < 2 * max(of_sequences)
        shapes.add((len(of_sequences), found.longest))
    assert {number & (number - 1) for shape in shapes for number in shape} == {0}
    assert cudnn.places((4096, 4096), torch.device("cpu")).added == 0


def test_tensors_of_rounded_lengths_are_not_copied():
    tensor = torch.randn(4096, 2, 8)
    assert cudnn.with_zeros(tensor, 0) is tensor
    assert cudnn.with_zeros(tensor, 3).shape == (4099, 2, 8)
    assert cudnn.with_zeros(tensor, 3)[4096:].count_nonzero() == 0
