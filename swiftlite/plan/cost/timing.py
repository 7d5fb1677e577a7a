"""Estimate the seconds of a matrix product, a pass over memory, and a collective on a GPU.

This module does not import torch. Each effect has one constant, which was measured on an H200, fitted (see
`tests/plan/test_speed.py`), counted from the kernels, or assumed. `layer_speed.py` computes the times of layers from
these functions.
"""

import math

from swiftlite.plan.cost.gpus import Gpu

_BFLOAT16 = 2
_TILE = (128, 256)
"""Rows and columns of the tile (block of a matrix product) that a processor computes at a time. The value is assumed;
it is typical for Hopper."""
PRODUCT_EFFICIENCY = 0.62
"""Share of the GPU's peak that is reached inside a tile, because clocks drop under load. The value was fitted, and is
used where none was measured, see `Software.products`."""
_INNER_START = 400
"""Time to start and end a tile, in steps along the inner dimension. The value was fitted."""
HBM_EFFICIENCY = 0.85
"""Share of the memory bandwidth that a pass over a large tensor reaches. Measured for a copy."""
LINK_EFFICIENCY = 0.8
"""Share of the bandwidth of NVLink and the network that NCCL reaches for large messages. The value is assumed."""
STARTS, _STARTS_BETWEEN_MACHINES = 15e-6, 40e-6
"""Seconds until a collective's first byte arrives, within a machine and between machines. The values are assumed."""


def product_seconds(
    gpu: Gpu,
    rows: float,
    columns: int,
    inner: float,
    number: int = 1,
    faster: float = 1,
    itemsize: float = _BFLOAT16,
    efficiency: float = PRODUCT_EFFICIENCY,
) -> float:
    """Return the seconds of matrix products [rows, inner] x [inner, columns] in one kernel.

    This is the time to compute complete tiles on all processors, or the time to move the matrices, whichever is longer.

    Args:
        faster: speed along the inner dimension relative to bfloat16. The time to start and end a tile does not change.
        itemsize: bytes per element of both factors; the result has 16 bits.
        efficiency: share of the peak that is reached inside a tile.
    """
    tiles = number * math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    waves = math.ceil(tiles / gpu.processors)
    flops = 2 * waves * gpu.processors * math.prod(_TILE) * (inner / faster + _INNER_START)
    moved = number * (itemsize * (rows * inner + inner * columns) + _BFLOAT16 * rows * columns)
    return max(flops / (gpu.peak_flops * efficiency), memory_seconds(gpu, moved))


def memory_seconds(gpu: Gpu, num_bytes: float) -> float:
    """Return the seconds of moving bytes between memory and processors."""
    return num_bytes / (gpu.hbm * HBM_EFFICIENCY)


def bandwidth(gpu: Gpu, size: int, stride: int) -> float:
    """Return the bytes per second that each rank of a group can send.

    Within a machine this is the bandwidth of the link. Between machines it is the bandwidth of the network ports of all
    ranks of the group on a machine.

    Args:
        size: number of ranks in the group.
        stride: distance between two neighboring ranks.
    """
    if size * stride <= gpu.linked:
        return gpu.link * LINK_EFFICIENCY
    on_a_machine = max(1, gpu.linked // stride)
    return min(gpu.link, gpu.network * on_a_machine) * LINK_EFFICIENCY


def collective_seconds(gpu: Gpu, size: int, stride: int, num_bytes: float) -> float:
    """Return the seconds of a gather or a reduce-scatter over a group.

    Args:
        num_bytes: bytes of the whole tensor; each rank sends `num_bytes * (size - 1) / size`.
    """
    if size == 1:
        return 0
    starts = _STARTS_BETWEEN_MACHINES
    if size * stride <= gpu.linked:
        starts = STARTS
    return starts + num_bytes * (size - 1) / size / bandwidth(gpu, size, stride)


def exchange_seconds(gpu: Gpu, size: int, stride: int, num_bytes: float) -> float:
    """Return the seconds of an all-to-all. Each rank sends the data for other machines through its own network port.

    Args:
        num_bytes: bytes that one rank sends to all ranks, including itself.
    """
    if size * stride <= gpu.linked:
        return collective_seconds(gpu, size, stride, num_bytes)
    leaving = num_bytes * (1 - max(1, gpu.linked // stride) / size)
    return _STARTS_BETWEEN_MACHINES + leaving / (gpu.network * LINK_EFFICIENCY)
