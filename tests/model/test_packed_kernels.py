"""Test the kernels of flash-attn and torch for packed rows against one call per sequence, and unrolled heads against a
mask.

The Python code of both packages is used, with stand-ins for their compiled kernels.
"""

import importlib
import random
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from swiftlite import families
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.data.batch import collate_packed
from swiftlite.data.sample import make_sample
from swiftlite.model.attention import attention as attention_module
from swiftlite.model.attention.draft_attention import Draft, DraftAttention
from swiftlite.model.attention.head_size import fill_values, fill_values_in_halves
from swiftlite.model.attention.merged_attention import PrefixKernel
from swiftlite.model.context_parallel import causal_segments
from swiftlite.model.forward import forward
from swiftlite.model.layers import kernels as kernels_module
from swiftlite.model.layers.kernels import modules_of, prefix_kernel, varlen_kernel
from swiftlite.plan.kernels import FlashImpl, Kernels, PackedKernel
from swiftlite.runtime.distributed import session
from tests import flash_stand_ins
from tests.model.test_attention import make_attention, varlen
from tests.model.test_logits import load_megatron
from tests.parallel.launch import launch
from tests.tiers import pairwise, selected, some_of
from tests.tiny import make_tiny_hf

NAMES: tuple[PackedKernel, ...] = ("flash_attn", "torch_varlen")
# Query heads, key-value heads, head size of queries and keys, of values.
SHAPES = {
    "64": (4, 4, 64, 64),
    "64 gqa": (4, 2, 64, 64),
    "128 gqa": (4, 1, 128, 128),
    "192 mla": (2, 2, 192, 128),
}
# float32: sums of 192 terms in another order. bfloat16: 2^-8 of the largest number for each of a few roundings.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
COUNTS = (1, 7, 60)
RANKS = ((0, 1), (0, 2), (1, 2))


def inputs(shape: str, num_queries: int, num_keys: int, dtype: torch.dtype, rows: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_queries)
    heads, groups, size, value_size = SHAPES[shape]
    sizes = [(num_queries, rows, heads, size), (num_keys, rows, groups, size), (num_keys, rows, groups, value_size)]
    return [torch.randn(*each, generator=generator).to(dtype).requires_grad_() for each in sizes]


def lengths(count: int) -> tuple[int, ...]:
    """Return the lengths of `count` sequences. Each length can be split over two ranks."""
    numbers = random.Random(count)
    return tuple(4 * numbers.randint(1, 40 if count < 10 else 6) for _ in range(count))


def difference(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference of all pairs of tensors, relative to the largest number of the expected tensor."""
    return max(
        float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in zip(ours, expected, strict=True)
    )


def measure(name: PackedKernel, shapes: Sequence[str]) -> dict[tuple[Any, ...], float]:
    """Return the difference of results and gradients from a call per sequence, by shape, number of sequences, rank and
    precision.
    """
    if name == "flash_attn":
        flash_stand_ins.install()
    kernels = Kernels("local", name)
    found = {}
    with session() as mesh:
        library = flash_stand_ins.torch_on_cpu()
        for shape in shapes:
            size = SHAPES[shape][2]
            options = {"varlen": varlen_kernel(kernels), "prefix": prefix_kernel(kernels)}
            attention = make_attention(mesh, k_channels=size, **options)
            for count in COUNTS:
                for rank, ranks in RANKS:
                    for dtype in BOUNDS:
                        row = lengths(count)
                        query, key, value = tensors = inputs(shape, sum(row) // ranks, sum(row), dtype)
                        segments = causal_segments(row, rank, ranks)
                        results = []
                        for attend in (attention._attend_segments, attention._attend_varlen, attention._attend_slices):
                            out = attend(query, key, value, segments)
                            results.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
                        expected, together, in_slices = results
                        found["together", shape, count, rank, ranks, dtype] = difference(together, expected)
                        found["in slices", shape, count, rank, ranks, dtype] = difference(in_slices, expected)
        found |= measure_sinks(mesh, kernels)
        library._destroy()
    return found


def measure_sinks(mesh: Any, kernels: Kernels) -> dict[tuple[Any, ...], float]:
    """Return the differences with sinks and windows, like `measure`."""
    found = {}
    for dtype, window in product(BOUNDS, (None, 10)):
        row = lengths(7)
        results = []
        for options in ({}, {"varlen": varlen_kernel(kernels), "prefix": prefix_kernel(kernels)}):
            attention: Any = make_attention(mesh, k_channels=64, has_sinks=True, window=window, **options).to(dtype)
            sinks = attention.softmax_offset
            sinks.data = torch.linspace(-2, 2, 4, dtype=dtype)
            query, key, value = tensors = inputs("64 gqa", sum(row), sum(row), dtype)
            out = attention._attend_row(query, key, value, causal_segments(row, 0, 1, window))
            results.append([out, *torch.autograd.grad(out.float().square().sum(), [*tensors, sinks])])
        expected, ours = results
        found[f"sinks, window {window}", "64 gqa", 7, 0, 1, dtype] = difference(ours, expected)
    return found


@pytest.fixture(scope="module", params=NAMES)
def measured(request) -> dict[tuple[Any, ...], float]:
    if request.param == "flash_attn" and (reason := flash_stand_ins.missing()):
        pytest.skip(reason)
    (found,) = launch(1, measure, request.param, selected(request, "packed_shape"))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("packed_shape", some_of(SHAPES, "64 gqa", "192 mla"))
def test_packed_rows_are_computed_as_sequence_by_sequence(measured, packed_shape):
    """Rows have 1 to 60 sequences, on one rank and on both of two ranks, with one kernel call and with one per
    segment.
    """
    of_shape = {
        key: value for key, value in measured.items() if key[1] == packed_shape and key[0] in ("together", "in slices")
    }
    assert len(of_shape) == 2 * len(COUNTS) * len(RANKS) * len(BOUNDS)
    assert {key: value for key, value in of_shape.items() if not value <= BOUNDS[key[-1]]} == {}


@pytest.mark.gloo
def test_sinks_and_windows(measured):
    of_sinks = {key: value for key, value in measured.items() if key[0].startswith("sinks")}
    assert len(of_sinks) == 2 * len(BOUNDS)
    assert {key: value for key, value in of_sinks.items() if not value <= BOUNDS[key[-1]]} == {}


def test_a_torch_whose_kernel_has_no_word_for_grouped_heads(monkeypatch):
    """In torch 2.11, varlen_attn supports fewer key heads without the argument that torch 2.13 requires for them."""
    calls = []

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=1.0, window_size=(-1, -1)):
        assert window_size == (-1, 0)
        calls.append(key.shape)
        return flash_stand_ins.forward(query, key, value, cu_seq_q, cu_seq_k, scale)[0]

    module = importlib.import_module("torch.nn.attention.varlen")
    query, key, value = (tensor.squeeze(1) for tensor in inputs("64 gqa", 20, 20, torch.float32))
    starts = torch.tensor([0, 8, 20], dtype=torch.int32)
    monkeypatch.setattr(module, "varlen_attn", varlen_attn)
    kernel = varlen_kernel(Kernels("local", "torch_varlen"))
    assert kernel is not None
    out = kernel(query, key, value, starts, starts, 12, 12, scale=0.1)
    assert calls == [key.shape]
    assert torch.equal(out, flash_stand_ins.forward(query, key, value, starts, starts, 0.1)[0])


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.found = max(self.found, out.numel())
        return out


def as_kernel() -> PrefixKernel:
    """Return a `PrefixKernel` that supports any precision."""

    def forward(query, key, value, cu_q, cu_k, longest_q, longest_k, scale):
        return flash_stand_ins.forward(query, key, value, cu_q, cu_k, scale)

    def backward(grad, query, key, value, out, lse, cu_q, cu_k, longest_q, longest_k, scale):
        grad_query, grad_key, grad_value = flash_stand_ins.backward(
            grad, query, key, value, out, lse, cu_q, cu_k, scale
        )
        return grad_query, grad_key, grad_value

    return fill_values_in_halves(PrefixKernel(forward, backward))


def unrolled(attention: Any, tensors: list[list[torch.Tensor]], segments: Any, masked: bool):
    """Return the output of the last step, and the gradients of all steps' queries, keys and values."""
    draft = Draft()
    for _, key, value in tensors:
        draft.add(key, value)
    attend = attention._attend_steps if masked else attention._attend_merged
    out = attend(tensors[-1][0], draft, segments)
    flat = [tensors[-1][0], *draft.keys, *draft.values]
    return [out, *torch.autograd.grad(out.square().sum(), flat)]


def steps(shape: str, row: tuple[int, ...], ranks: int, count: int, dtype: torch.dtype, rows: int):
    """Return queries, keys and values of each step. Keys of the first step are those of the whole row."""
    local = sum(row) // ranks
    sizes = [sum(row)] + [local] * (count - 1)
    made = [inputs(shape, local, size, dtype, rows) for size in sizes]
    return [[tensor.detach().mul(1 + 0.1 * step).requires_grad_() for tensor in each] for step, each in enumerate(made)]


@pytest.mark.parametrize(
    ("shape", "place", "count", "rows", "row_and_long"),
    pairwise(["64", "64 gqa", "192 mla"], RANKS, [2, 3], [1, 2], [((8, 4, 20), 2048), ((8, 4, 20), 1), ((32,), 2048)]),
)
def test_later_steps_merge_what_a_mask_would_show_them(mesh, monkeypatch, shape, place, count, rows, row_and_long):
    """Results in float64 are equal up to the order of sums.

    Single sequences and long segments use separate kernel calls.
    """
    (rank, ranks), (row, long) = place, row_and_long
    monkeypatch.setattr(attention_module, "LONG", long)
    attention = make_attention(mesh, DraftAttention, prefix=as_kernel())
    attention.softmax_scale = SHAPES[shape][2] ** -0.5
    tensors = steps(shape, row, ranks, count, torch.float64, rows)
    segments = causal_segments(row, rank, ranks)
    merged = unrolled(attention, tensors, segments, masked=False)
    masked = unrolled(attention, tensors, segments, masked=True)
    assert difference(merged, masked) < 1e-13


def test_later_steps_hold_no_score_of_each_pair(mesh):
    """A kernel computes scores block by block. A mask and its scores would be among the largest tensors of a step."""
    row = (512,)
    shape, segments = "64 gqa", causal_segments(row, 0, 1)
    seen = []
    kernel = as_kernel()
    unseen = PrefixKernel(partial(_unseen, kernel.forward), partial(_unseen, kernel.backward))
    for masked in (False, True):
        attention = make_attention(mesh, DraftAttention, prefix=unseen)
        tensors = steps(shape, row, 1, 2, torch.float32, 1)
        with Largest() as largest:
            unrolled(attention, tensors, segments, masked)
        seen.append(largest.found)
    heads, _, size, _ = SHAPES[shape]
    assert seen[0] <= 2 * 512 * heads * size  # queries; keys and values of their heads
    assert seen[1] >= 512 * 1024


def _unseen(function, *args):
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return function(*args)


def merge_over(name: PackedKernel) -> list[float]:
    """Return the differences between a package's Python code and attention with a mask, by precision."""
    if name == "flash_attn":
        flash_stand_ins.install()
    found = []
    with session() as mesh:
        library = flash_stand_ins.torch_on_cpu()
        attention = make_attention(mesh, DraftAttention, prefix=prefix_kernel(Kernels("local", name)))
        row = (8, 4, 20)
        for dtype in BOUNDS:
            attention.softmax_scale = 192**-0.5
            tensors = steps("192 mla", row, 2, 3, dtype, 2)
            segments = causal_segments(row, 1, 2)
            results = [unrolled(attention, tensors, segments, masked) for masked in (False, True)]
            found.append(difference(*results))
        library._destroy()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("name", NAMES)
def test_later_steps_merge_over_each_package(name):
    if name == "flash_attn" and (reason := flash_stand_ins.missing()):
        pytest.skip(reason)
    (found,) = launch(1, merge_over, name)
    assert [value <= bound for value, bound in zip(found, BOUNDS.values(), strict=True)] == [True, True], found


@pytest.mark.parametrize(
    ("row", "rank", "ranks", "rows", "calls"),
    [
        ((32,), 1, 2, 1, 2),  # a kernel for each segment
        ((32,), 1, 2, 2, 0),  # rows side by side are copies in any case
        ((8, 24), 1, 2, 1, 0),  # short sequences
        ((8, 24), 0, 1, 1, 0),  # nothing is shared
    ],
)
def test_keys_that_segments_share_are_not_copied(mesh, row, rank, ranks, rows, calls):
    """The kernel receives the row's own keys and values, and these are also what is stored for the backward pass."""
    seen = []
    kernel = as_kernel()

    def forward(query, key, value, *others):
        seen.append((key, value))
        return kernel.forward(query, key, value, *others)

    options: dict[str, Any] = {"varlen": fill_values(varlen), "prefix": PrefixKernel(forward, kernel.backward)}
    attention = make_attention(mesh, k_channels=64, **options)
    query, key, value = inputs("64 gqa", sum(row) // ranks, sum(row), torch.float64, rows)
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = attention._attend_row(query, key, value, causal_segments(row, rank, ranks))
    assert len(seen) == calls
    of_row = {tensor.untyped_storage().data_ptr() for tensor in (key, value)}
    assert all(tensor.untyped_storage().data_ptr() in of_row for each in seen for tensor in each)
    if calls:  # else queries and results, as in any case
        others = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in of_row]
        assert {len(tensor) for tensor in others} == {sum(row) // ranks}
    expected = attention._attend_segments(query, key, value, causal_segments(row, rank, ranks))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)


def test_kernels_for_newer_gpus_take_values_as_they_are():
    """Values with the sizes of DeepSeek's heads are not padded; other values are padded with zeros."""
    theirs = ((192, 128),)
    for sizes, others, expected in [((192, 128), (), 192), ((192, 128), theirs, 128), ((24, 16), theirs, 24)]:
        key, value = torch.zeros(3, 1, sizes[0]), torch.zeros(3, 1, sizes[1])
        given = []

        def kernel(query, key, value, *places, scale, given=given):
            given.append(value.size(-1))
            return value

        out = fill_values(kernel, others)(key, key, value, scale=1.0)
        assert (given, out.size(-1)) == ([expected], sizes[1])
    assert kernels_module._other_sizes(Kernels("local", "torch_varlen")) == ()
    assert kernels_module._other_sizes(Kernels("local", "torch_varlen", flash_impl="FA3")) == theirs


def test_a_cpu_has_none():
    assert prefix_kernel(Kernels()) is None


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_an_unrolled_head_learns_the_same_from_packed_rows(family, mesh, tmp_path):
    """One head drafts three tokens, in float32, with torch's kernel and with masks."""
    directory = make_tiny_hf(tmp_path, family, depth=1)
    hf_config = read_config(directory)
    samples = [make_sample(torch.arange(length).numpy() % 100 + length, np.ones(length)) for length in (9, 5, 12)]
    library = flash_stand_ins.torch_on_cpu()
    results = []
    for kernels in (Kernels(), Kernels("local", "torch_varlen")):
        kind = families.get(hf_config)
        options: dict[str, Any] = {"heads": Heads(1, 3), "drafting": kind.mtp.drafting, "kernels": kernels}
        model = load_megatron(directory, mesh, torch.float32, **options)
        losses = forward(model, collate_packed(samples, pad_token_id=0, num_drafts=3))
        total = losses.main.loss_BS.sum() + sum(loss.loss_BS.sum() for loss in losses.mtp)
        total.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append([*(loss.loss_BS for loss in losses.mtp), *gradients])
    library._destroy()
    assert len(results[0]) == len(results[1]) > 3
    assert difference(results[1], results[0]) < 2e-5


def activated(impl: FlashImpl) -> list[str]:
    """Return the implementations that torch was asked to activate for the kernels of two models."""
    asked = []

    class Handle:
        def remove(self) -> None:
            pass

    def register() -> Handle:
        asked.append(impl)
        return Handle()

    torch.nn.attention.register_flash_attention_impl(impl, register_fn=register)
    for _ in range(2):
        modules_of(Kernels("local", "torch_varlen", flash_impl=impl))
    return asked


@pytest.mark.gloo
@pytest.mark.parametrize("impl", ["FA3", "FA4"])
def test_newer_kernels_are_activated_once(impl):
    assert launch(1, activated, impl) == [[impl]]
