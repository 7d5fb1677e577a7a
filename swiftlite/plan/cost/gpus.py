"""Vendor specifications of GPUs, for MFU and for `speed.py`."""

from dataclasses import dataclass

_GB = 1e9
_TB = 1e12
_ETHERNET = 12.5 * _GB
"""Bytes per second of a network port of 100 Gbit/s."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        capability: compute capability, which determines the supported precisions.
        peak_flops: bfloat16 operations per second on tensor cores, without sparsity.
        processors: number of streaming multiprocessors. Each computes one tile (block) of a matrix product at a time.
        memory_gb: memory, in GB (1e9 bytes).
        hbm: bytes per second between memory and processors.
        link: bytes per second from a GPU to other GPUs in its machine, over NVLink or, without NVLink, PCIe.
        linked: number of GPUs that are connected by `link`.
        network: bytes per second from a GPU to other machines, with one network port per GPU.
    """

    capability: float
    peak_flops: float
    processors: int
    memory_gb: float
    hbm: float
    link: float
    linked: int = 8
    network: float = 50 * _GB


GPUS = {
    "A100": Gpu(8.0, 312e12, 108, 80, 2.04 * _TB, 300 * _GB, network=25 * _GB),
    "A800": Gpu(8.0, 312e12, 108, 80, 2.04 * _TB, 200 * _GB, network=25 * _GB),
    "H100 PCIe": Gpu(9.0, 756e12, 114, 80, 2.0 * _TB, 64 * _GB),
    "H100 NVL": Gpu(9.0, 835e12, 132, 94, 3.9 * _TB, 64 * _GB),
    "H100": Gpu(9.0, 989e12, 132, 80, 3.35 * _TB, 450 * _GB),
    "H200 NVL": Gpu(9.0, 835e12, 132, 141, 4.8 * _TB, 450 * _GB, linked=4),
    "H200": Gpu(9.0, 989e12, 132, 141, 4.8 * _TB, 450 * _GB),
    "H800": Gpu(9.0, 989e12, 132, 80, 3.35 * _TB, 200 * _GB),
    "H20": Gpu(9.0, 148e12, 78, 96, 4.0 * _TB, 450 * _GB),
    "GB200": Gpu(10.0, 2500e12, 152, 186, 8.0 * _TB, 900 * _GB, linked=72),
    "B200": Gpu(10.0, 2250e12, 148, 180, 8.0 * _TB, 900 * _GB),
    "L40S": Gpu(8.9, 362e12, 142, 48, 0.864 * _TB, 32 * _GB, network=_ETHERNET),
    "4090": Gpu(8.9, 165e12, 128, 24, 1.008 * _TB, 32 * _GB, network=_ETHERNET),
}
"""GPUs by a part of their name in the driver; the first match is used. The figures are published by the vendors, and
rounded. The figures for the network are assumed; the default is a port of 400 Gbit/s per GPU.
"""


def gpu_named(name: str) -> Gpu | None:
    """Return the GPU whose name in the driver is `name`; None if it is unknown."""
    return next((gpu for part, gpu in GPUS.items() if part in name), None)
