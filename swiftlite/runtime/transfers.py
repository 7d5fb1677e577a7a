"""Copies between the host and a GPU that overlap with computations, in one direction per stream.

Nothing waits on the host: a copy starts when its source is computed, and what reads its result waits on the GPU. On a
CPU all functions return their arguments.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Event = torch.cuda.Event | torch.Event
"""What torch returns for a stream of a GPU."""


@dataclass(frozen=True)
class Stored:
    """A tensor that is copied to the host.

    Attributes:
        tensor: in pinned memory. The host reads it only after `Device.synchronize`.
        written: event after the copy; None on a CPU.
    """

    tensor: torch.Tensor
    written: Event | None = None


class Transfers:
    """Streams for the copies of one device."""

    def __init__(self, device: torch.device):
        self._device, self._is_cuda = device, device.type == "cuda"
        if self._is_cuda:
            self._to_host, self._to_device, self._weights = (torch.cuda.Stream(device) for _ in range(3))

    def store(self, tensor: torch.Tensor, place: Stored | None = None) -> Stored:
        """Copy a tensor of the device to the host.

        Args:
            place: an earlier result for a tensor of this shape, whose memory is used again. Its content may still be
                on the way to the device, if `tensor` is computed from it.
        """
        if not self._is_cuda:
            return Stored(tensor)
        self._to_host.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._to_host):
            if place is None:
                host = tensor.to("cpu", non_blocking=True)  # torch pins the result
            else:
                host = place.tensor.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._to_host)
        return Stored(host, self._to_host.record_event())

    def fetch(self, stored: Sequence[Stored]) -> Iterator[torch.Tensor]:
        """Yield the tensors on the device. Each is copied while the caller works on the one before.

        The caller may replace tensors that it has got in the sequence.
        """
        if not self._is_cuda:
            yield from (each.tensor for each in stored)
            return
        following = self._start(stored[0]) if stored else None
        for number in range(1, len(stored) + 1):
            assert following is not None
            tensor, arrived = following
            following = self._start(stored[number]) if number < len(stored) else None
            torch.cuda.current_stream().wait_event(arrived)
            tensor.record_stream(torch.cuda.current_stream())
            yield tensor

    def _start(self, stored: Stored) -> tuple[torch.Tensor, Event]:
        assert stored.written is not None
        self._to_device.wait_event(stored.written)
        with torch.cuda.stream(self._to_device):
            tensor = stored.tensor.to(self._device, non_blocking=True)
        return tensor, self._to_device.record_event()

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return pinned memory for the content of an uninitialized tensor; on a CPU the tensor itself."""
        if not self._is_cuda:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def mark(self) -> Event | None:
        """Return an event after all computations that are queued; None on a CPU."""
        return torch.cuda.current_stream().record_event() if self._is_cuda else None

    def fill(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], free: Event | None) -> None:
        """Copy the content of staged tensors to the tensors themselves, before all computations that follow.

        Args:
            pairs: tensors, and the result of `staged` for each.
            free: event after the last computation with other tensors in the same memory.
        """
        if free is None:
            return
        self._weights.wait_event(free)
        with torch.cuda.stream(self._weights):
            for tensor, content in pairs:
                tensor.copy_(content, non_blocking=True)
        torch.cuda.current_stream().wait_event(self._weights.record_event())
