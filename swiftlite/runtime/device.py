"""The device of this process: one object, cuda or cpu, so that callers need no `if`."""

import os
import resource
from dataclasses import dataclass

import torch

from swiftlite.errors import UserError
from swiftlite.estimate.gpus import gpu_named


@dataclass(frozen=True)
class Device:
    """The device of this process and the backend that connects it to the others."""

    torch_device: torch.device
    backend: str  # of torch.distributed: nccl or gloo

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def peak_flops(self) -> float | None:
        """Dense bfloat16 operations per second that the maker promises; None where that is not known here."""
        name = torch.cuda.get_device_name(self.torch_device) if self.is_cuda else ""
        gpu = gpu_named(name)
        return gpu.peak_flops if gpu else None

    @property
    def peak_memory(self) -> int:
        """Most bytes that tensors have had on a CUDA device so far; without one, that this process has had."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.torch_device)
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB

    def synchronize(self) -> None:
        """Wait for the device's queue; a CPU has none."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor there. Of a copy from the host to a GPU nothing waits: from memory that is not pinned, the host would
    wait for all that the GPU still has to do."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def current_device() -> Device:
    """The CUDA device of LOCAL_RANK when there is one, else the CPU.

    Raises:
        UserError: there are GPUs, but fewer than processes.
    """
    if torch.cuda.is_available():
        index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= count:
            raise UserError(
                f"more processes than GPUs: LOCAL_RANK is {index}, and this machine has {count}",
                f"export NPROC_PER_NODE={count}, or CUDA_VISIBLE_DEVICES='' to compute on the CPU",
            )
        torch.cuda.set_device(index)
        return Device(torch.device("cuda", index), "nccl")
    return Device(torch.device("cpu"), "gloo")
