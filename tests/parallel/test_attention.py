"""Test core attention over context-parallel ranks: outputs and gradients against one process."""

import itertools
from typing import Any

import pytest
import torch

from swiftlite.args.fields import ParallelLayout
from swiftlite.model.attention import attention as attention_module
from swiftlite.model.attention.head_size import fill_values
from swiftlite.model.context_parallel import shard_sequence, unshard_sequence
from swiftlite.runtime.distributed import session
from tests.messages import naming
from tests.model.test_attention import SHAPES, make_attention, make_inputs, make_packed, varlen
from tests.model.test_packed_kernels import as_kernel
from tests.parallel.launch import launch

pytestmark = pytest.mark.gloo


def padded_to(multiple: int, lengths: list[int]) -> list[int]:
    return [-(-length // multiple) * multiple for length in lengths]


def layouts(size: int) -> dict[str, list[int] | None]:
    """Return lengths of the sequences of rows, each padded to a multiple of 2 * size; None is a dense row."""
    multiple = 2 * size
    return {
        "dense": None,
        "packed": padded_to(multiple, [13, 1, 40, 7]),
        "one chunk of one token": [multiple],  # a sequence of one token, padded
        "odd chunks": [3 * multiple, multiple, 5 * multiple],
    }


DTYPES = {"float32": torch.float32, "float64": torch.float64}
CASES = list(itertools.product(SHAPES, layouts(2), DTYPES))
# A call for each sequence, one kernel for all, and a kernel for each segment.
WAYS = ("calls", "together", "in slices")
# Another kernel (with a mask) and sums over ranks: rounding on numbers of up to 7, 8e-7 a step in float32. A wrong key
# or a missing rank changes the first digit.
ATOL = {"float32": 4e-6, "float64": 1e-14}


def run(attention, inputs, cu_seqlens, rank: int, size: int) -> list[torch.Tensor]:
    """Return the part of rank `rank` of the output, and of the gradients of queries, keys and values."""
    local = [shard_sequence(t.detach(), 0, rank, size, cu_seqlens).requires_grad_() for t in inputs]
    packed = None if cu_seqlens is None else make_packed(cu_seqlens.diff().tolist())
    out = attention(*local, None, packed_seq_params=packed)
    # Each output row has a gradient of its own, which depends on where it stands in the whole row.
    weight = torch.linspace(-1, 1, out.numel() * size, dtype=out.dtype).view(-1, *out.shape[1:])
    out.backward(shard_sequence(weight, 0, rank, size, cu_seqlens))
    return [out.detach(), *(t.grad for t in local if t.grad is not None)]


def case(shape: str, layout: str, dtype: str, size: int):
    lengths = layouts(size)[layout]
    if lengths is None:
        return make_inputs(24, shape, DTYPES[dtype], rows=2), None
    return make_inputs(sum(lengths), shape, DTYPES[dtype]), torch.tensor(
        [0, *itertools.accumulate(lengths)], dtype=torch.int32
    )


def kernels(way: str) -> dict[str, Any]:
    """Return options of CoreAttention."""
    attention_module.LONG = 1 if way == "in slices" else 2048
    return {} if way == "calls" else {"varlen": fill_values(varlen), "prefix": as_kernel()}


def run_all(size: int) -> dict[tuple[str, str, str, str], list[torch.Tensor]]:
    """Run all cases in this process."""
    with session(ParallelLayout(context_parallel_size=size)) as mesh:
        results = {}
        for shape, layout, dtype in CASES:
            inputs, cu_seqlens = case(shape, layout, dtype, size)
            for way in WAYS:
                attention = make_attention(mesh, k_channels=SHAPES[shape][2], **kernels(way))
                results[way, shape, layout, dtype] = run(attention, inputs, cu_seqlens, mesh.cp.rank(), size)
        mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
        with pytest.raises(ValueError, match=naming("attention_mask")):
            make_attention(mesh)(*make_inputs(12, "gqa", rows=1), mask)
        with pytest.raises(ValueError, match=naming(f"{size} {12 * size}")):
            make_attention(mesh)(*make_inputs(12, "gqa"), None, packed_seq_params=make_packed([12]))
    return results


@pytest.fixture(scope="module", params=[2, 4])
def parallel(request) -> tuple[int, list[dict[tuple[str, str, str, str], list[torch.Tensor]]]]:
    return request.param, launch(request.param, run_all, request.param)


@pytest.mark.parametrize(("shape", "layout", "dtype"), CASES)
def test_ranks_compute_what_one_process_computes(mesh, parallel, shape, layout, dtype):
    size, results = parallel
    inputs, cu_seqlens = case(shape, layout, dtype, size)
    alone = run(make_attention(mesh, k_channels=SHAPES[shape][2]), inputs, cu_seqlens, 0, 1)
    assert len(alone) == 4
    for way in WAYS:
        for expected, *parts in zip(alone, *(result[way, shape, layout, dtype] for result in results), strict=True):
            ours = unshard_sequence(parts, 0, cu_seqlens)
            torch.testing.assert_close(
                ours, expected, rtol=0, atol=ATOL[dtype], msg=lambda text, way=way: f"{way}: {text}"
            )
