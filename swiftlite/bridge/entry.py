"""Locate a tensor in a safetensors file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from operator import mul

import torch

TensorTypes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors, by key."""
Box = tuple[range, ...]
"""A part of a tensor: one range per axis."""


@dataclass(frozen=True)
class Entry:
    """The location of one tensor.

    Attributes:
        offset: in bytes from the start of the file.
        is_transposed: whether the file has the transpose of the matrix with this shape.
        row_length: number of elements from one row in the file to the next, if rows contain other tensors too; None:
            rows are contiguous.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    offset: int
    is_transposed: bool = False
    row_length: int | None = None

    @property
    def in_file(self) -> "Entry":
        """The location of the tensor that the file has: the matrix or its transpose."""
        if not self.is_transposed:
            return self
        return replace(self, shape=self.shape[::-1], is_transposed=False)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def contiguous_ranges(self, box: Box) -> Iterator[tuple[int, int]]:
        """Yield the contiguous byte ranges of a box in the file, in order, as (offset, length).

        Example: rows 1 and 2, columns 3 to 5, of a bfloat16 tensor [4, 10] that starts at byte 100 of the file. A row
        has 20 bytes and an element 2, so the ranges are (126, 6) and (146, 6).
        """
        if not box:  # a tensor without axes, a single number
            yield self.offset, self.nbytes
            return
        # In a row that other tensors share, the whole width of a box is a cut too: each row is a separate range.
        lengths = (*self.shape[:-1], self.row_length or self.shape[-1])
        cut_axes = [axis for axis, wanted in enumerate(box) if len(wanted) < lengths[axis]]
        last = max(cut_axes, default=0)  # the box is not cut along later axes
        strides = [prod(lengths[axis + 1 :]) * self.dtype.itemsize for axis in range(last + 1)]
        start = self.offset + box[last].start * strides[last]
        length = len(box[last]) * strides[last]
        for position in product(*box[:last]):
            yield start + sum(map(mul, position, strides)), length
