"""Seconds of one matrix product, one pass over memory, one collective on a kind of GPU. Arithmetic, no torch.

Each effect has one constant here. It says whether it was fitted (`tests/plan/test_speed.py` tells how), counted from
what the kernels do, or assumed; none was measured. Next: `layer_speed.py`, what a layer is made of.
"""

import math

from swiftlite.estimate.gpus import Gpu

_BFLOAT16 = 2
_TILE = (128, 256)
"""Rows and columns of a product that a processor computes at one time. Assumed, as a usual one for Hopper."""
PRODUCT_EFFICIENCY = 0.62
"""Part of the peak inside a tile; clocks fall under load. Fitted."""
_INNER_START = 400
"""What starting and ending a tile costs, in steps along the inner side. Fitted."""
HBM_EFFICIENCY = 0.85
"""Part of the memory's bandwidth that a pass over a large tensor gets. Assumed."""
LINK_EFFICIENCY = 0.8
"""Part of NVLink's and the network's bandwidth that NCCL gets for large messages. Assumed."""
STARTS, _STARTS_BETWEEN_MACHINES = 15e-6, 40e-6
"""Seconds until a collective's first byte arrives. Assumed."""


def product_seconds(
    gpu: Gpu,
    rows: float,
    columns: int,
    inner: float,
    number: int = 1,
    faster: float = 1,
    itemsize: float = _BFLOAT16,
) -> float:
    """Seconds of matrix products [rows, inner] x [inner, columns] that are started together: computing, in whole tiles
    on all processors at once, or moving their matrices, whichever is longer.

    Args:
        faster: than bfloat16 the inner side is passed; a tile starts and ends as in bfloat16.
        itemsize: bytes of a number of both factors; the result is of 16 bits.
    """
    tiles = number * math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    waves = math.ceil(tiles / gpu.processors)
    flops = 2 * waves * gpu.processors * math.prod(_TILE) * (inner / faster + _INNER_START)
    moved = number * (itemsize * (rows * inner + inner * columns) + _BFLOAT16 * rows * columns)
    return max(flops / (gpu.peak_flops * PRODUCT_EFFICIENCY), memory_seconds(gpu, moved))


def memory_seconds(gpu: Gpu, num_bytes: float) -> float:
    """Seconds of moving bytes between memory and processors."""
    return num_bytes / (gpu.hbm * HBM_EFFICIENCY)


def bandwidth(gpu: Gpu, size: int, stride: int) -> float:
    """Bytes per second that each rank of a group gets: the link inside a machine, else the network ports of all ranks
    that the group has on a machine.

    Args:
        size: ranks of the group.
        stride: distance between two neighbours of it.
    """
    if size * stride <= gpu.linked:
        return gpu.link * LINK_EFFICIENCY
    on_a_machine = max(1, gpu.linked // stride)
    return min(gpu.link, gpu.network * on_a_machine) * LINK_EFFICIENCY


def collective_seconds(gpu: Gpu, size: int, stride: int, num_bytes: float) -> float:
    """Seconds of a gather or a reduce-scatter over a group.

    Args:
        num_bytes: the whole tensor's; each rank sends all of it but its own share.
    """
    if size == 1:
        return 0
    starts = STARTS if size * stride <= gpu.linked else _STARTS_BETWEEN_MACHINES
    return starts + num_bytes * (size - 1) / size / bandwidth(gpu, size, stride)


def exchange_seconds(gpu: Gpu, size: int, stride: int, num_bytes: float) -> float:
    """Seconds of an exchange in which each rank sends another part to each: what leaves the machine goes through the
    rank's own network port.

    Args:
        num_bytes: what one rank sends, its own part included.
    """
    if size * stride <= gpu.linked:
        return collective_seconds(gpu, size, stride, num_bytes)
    leaving = num_bytes * (1 - max(1, gpu.linked // stride) / size)
    return _STARTS_BETWEEN_MACHINES + leaving / (gpu.network * LINK_EFFICIENCY)
