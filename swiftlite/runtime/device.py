"""Define `Device`, one interface for CUDA and CPU, so that callers do not have to distinguish them."""

import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swiftlite.base.errors import UserError
from swiftlite.plan.cost.gpus import gpu_named


@dataclass(frozen=True)
class Device:
    """The device of this process, and the backend for communication with other processes."""

    torch_device: torch.device
    backend: str  # backend of torch.distributed: nccl or gloo

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def capability(self) -> float:
        """Compute capability, such as 9.0; 0 on a CPU."""
        if not self.is_cuda:
            return 0.0
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        return major + minor / 10

    @property
    def peak_flops(self) -> float | None:
        """Dense bfloat16 operations per second from the vendor's specification; None for an unknown device."""
        if not self.is_cuda:
            return None
        gpu = gpu_named(torch.cuda.get_device_name(self.torch_device))
        return gpu.peak_flops if gpu else None

    @property
    def peak_memory(self) -> int:
        """Peak bytes of tensors on the CUDA device so far; on a CPU, peak memory of this process."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.torch_device)
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB

    def synchronize(self) -> None:
        """Wait for all work that is queued on the device. On a CPU, return immediately."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device without waiting.

    The tensor is pinned first, because copying from unpinned memory to a GPU waits for all queued work.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def start_copy_to_host(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Start to copy tensors of one dtype and device to the host, all in one copy.

    Returns:
        A function that waits for this copy, but not for work that the device was given later, and returns the tensors
            on the host.
    """
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    copied, done = flat.to("cpu", non_blocking=True), None  # in pinned memory
    if flat.is_cuda:
        done = torch.cuda.Event()
        done.record()

    def wait() -> list[torch.Tensor]:
        if done is not None:
            done.synchronize()
        parts = copied.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    return wait


def current_device() -> Device:
    """Select the CUDA device with index LOCAL_RANK, or the CPU if there is no GPU.

    Raises:
        UserError: this machine has fewer GPUs than processes.
    """
    if torch.cuda.is_available():
        index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= count:
            raise UserError(
                f"more processes than GPUs: LOCAL_RANK is {index}, and this machine has {count}",
                f"export NPROC_PER_NODE={count}, or CUDA_VISIBLE_DEVICES='' to run on the CPU",
            )
        torch.cuda.set_device(index)
        return Device(torch.device("cuda", index), "nccl")
    return Device(torch.device("cpu"), "gloo")
