"""Where a tensor lies in a safetensors file."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

TensorTypes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors, by key."""


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
