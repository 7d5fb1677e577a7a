"""The device of this process: one object, cuda or cpu, so that callers need no `if`."""

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """Where this process computes and which backend connects it to the others."""

    torch_device: torch.device
    backend: str  # of torch.distributed: nccl or gloo

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device's queue; a CPU has none."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)


def current_device() -> Device:
    """The CUDA device of LOCAL_RANK when there is one, else the CPU."""
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(index)
        return Device(torch.device("cuda", index), "nccl")
    return Device(torch.device("cpu"), "gloo")
