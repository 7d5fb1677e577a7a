"""Where a tensor lies in a safetensors file."""

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies. `offset` counts bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize
