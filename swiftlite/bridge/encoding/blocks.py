"""Encode matrices as codes of a few bits, with one scale, and possibly one zero point, for each block of a matrix.

The formats of DeepSeek-V3, compressed-tensors, GPTQ and AWQ differ only in names, in the order of numbers in the files,
and in the size of blocks. Each format is therefore a `Blocks` with other values. Terms: a channel is a row of a matrix
(one output of a linear layer), a group is a number of consecutive columns of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import torch

from swiftlite.bridge.entry import Box

LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = (*_FP4, *(-value for value in _FP4))
"""Values of the 16 codes of FP4 (e2m1)."""


@dataclass(frozen=True)
class Packing:
    """Unsigned numbers of a few bits in the words of an integer tensor.

    Example: AWQ has eight numbers of four bits in a word, in the order 0 2 4 6 1 3 5 7. The number 1 is therefore at
    place 4, which are the bits 16 to 19.

    Args:
        bits: bits of a number.
        axis: axis of the matrix along which consecutive numbers are in one word.
        word: dtype of a word.
        places: the place in a word of each of its numbers; empty if the numbers are in order.
    """

    bits: int
    axis: int
    word: torch.dtype = torch.int32
    places: tuple[int, ...] = ()

    @property
    def per_word(self) -> int:
        return self.word.itemsize * 8 // self.bits

    def shifts(self) -> torch.Tensor:
        """Return the position in a word, in bits, of each of its numbers."""
        return torch.tensor(self.places or range(self.per_word), dtype=torch.int32) * self.bits


@dataclass(frozen=True)
class Layout:
    """The layout of a matrix in a stored tensor.

    Args:
        ending: last component of the stored tensor's key, such as "weight_packed".
        is_transposed: whether the file has the transpose of the matrix.
        packing: how numbers are packed; None: one number per element.
        axes: number of axes in the file. Trailing axes of length 1 can be omitted, for example of one scale per row.
            With 4 axes, each axis of the matrix is followed by one of length 1.
    """

    ending: str
    is_transposed: bool = False
    packing: Packing | None = None
    axes: int = 2

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the file of a matrix of this shape."""
        return tuple(len(part) for part in self.box(tuple(range(length) for length in shape)))

    def box(self, box: Box) -> Box:
        """Return the box in the file that contains a box of the matrix; numbers are packed in whole words."""
        rows, columns = box
        if self.packing and self.packing.axis == 0:
            rows = _blocks_of(rows, self.packing.per_word)
        if self.packing and self.packing.axis == 1:
            columns = _blocks_of(columns, self.packing.per_word)
        if self.is_transposed:
            rows, columns = columns, rows
        if self.axes == 4:
            return rows, range(1), columns, range(1)
        return (rows, columns)[: self.axes]

    def unpack(self, part: torch.Tensor, box: Box) -> torch.Tensor:
        """Return the numbers of a box of the matrix from the part of the stored tensor that `box` returns for it."""
        rows, columns = box
        # Before unpacking, because the axis of the packing is that of the matrix.
        if self.is_transposed:
            part = part.T
        if self.packing is None:
            return part.reshape(len(rows), len(columns))
        packing = self.packing
        mask = (1 << packing.bits) - 1
        if packing.axis == 0:
            # The shift of a negative word moves in copies of its sign, which the mask removes.
            numbers = (part.int()[:, None, :] >> packing.shifts()[:, None]) & mask
            # [words, columns] has become [words, numbers per word, columns]: the first two axes are rows.
            return _within(numbers.flatten(0, 1), rows, packing.per_word, 0)
        numbers = (part.int()[:, :, None] >> packing.shifts()) & mask
        return _within(numbers.flatten(1, 2), columns, packing.per_word, 1)

    def pack(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the stored tensor of a matrix. A packed matrix is padded with zeros to whole words."""
        if self.packing is not None:
            packing = self.packing
            if packing.axis == 0:
                matrix = matrix.T
            padding = -matrix.shape[1] % packing.per_word
            padded = torch.nn.functional.pad(matrix.int(), (0, padding)).unflatten(1, (-1, packing.per_word))
            # The numbers have no common bits, so their sum is their union.
            words = (padded << packing.shifts().to(padded.device)).sum(dim=2, dtype=torch.int32)
            matrix = words.to(packing.word)
            if packing.axis == 0:
                matrix = matrix.T
        if self.is_transposed:
            matrix = matrix.T
        return matrix.reshape(matrix.shape[: self.axes])


@dataclass(frozen=True)
class Blocks:
    """Codes of a matrix, with one scale for each block of rows and columns, as an `Encoding`.

    A number is (code - zero point) * scale. For example, compressed-tensors stores `x.weight` [6, 64] in four bits with
    groups of 32 columns as codes `x.weight_packed` int32 [6, 8] and scales `x.weight_scale` [6, 2]; the codes are
    unsigned, and the zero point is 8. Decoding columns 30 to 33 requires words 3 and 4 of each row, and both scales.

    Args:
        shape: rows and columns of the matrix.
        block: rows and columns of a block; blocks at the ends can be smaller.
        codes, scales: layouts of codes and scales.
        zero_points: layout of zero points; None if they are all equal to `zero_point`.
        zero_point: zero point of all blocks, or a number that is added to each stored zero point.
        group_of_column: ending of the key of a tensor with the block index of each column (`g_idx`); None if the blocks
            consist of consecutive columns.
        factor: ending of the key of a single number by which all scales are divided, and its number of axes.
        multiplies: whether scales are multiplied by `factor` instead.
        unread: endings of further stored tensors that are not required for decoding, and their shapes.
        dtype: dtype of the computation; None: that of the scales.
        values: values of the codes; None: each code is its own value.
        exponent_bias: None, or the number that is subtracted from stored scales, which are exponents of two.
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    codes: Layout
    scales: Layout
    zero_points: Layout | None = None
    zero_point: int = 0
    group_of_column: str | None = None
    factor: tuple[str, int] | None = None
    multiplies: bool = False
    unread: tuple[tuple[str, tuple[int, ...]], ...] = ()
    dtype: torch.dtype | None = None
    values: tuple[float, ...] | None = None
    exponent_bias: int | None = None

    @property
    def axis(self) -> int:
        """The axis along which the parts of the codes are contiguous in the file."""
        return int(self.codes.is_transposed)

    @property
    def grid(self) -> tuple[int, int]:
        """The number of blocks along each axis."""
        # Rounded up: the last block of an axis can be smaller.
        rows, columns = (-(-length // n) for length, n in zip(self.shape, self.block, strict=True))
        return rows, columns

    def entries(self, name: str) -> tuple[str, ...]:
        """Return the keys of the stored tensors of the matrix `name`, which ends with "weight"."""
        return tuple(name.removesuffix("weight") + ending for ending in self.shapes())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each stored tensor, by the ending of its key."""
        shapes = {self.codes.ending: self.codes.shape(self.shape), self.scales.ending: self.scales.shape(self.grid)}
        if self.zero_points:
            shapes[self.zero_points.ending] = self.zero_points.shape(self.grid)
        if self.group_of_column:
            shapes[self.group_of_column] = (self.shape[1],)
        if self.factor:
            shapes[self.factor[0]] = (1,) * self.factor[1]
        return shapes | dict(self.unread)

    def boxes(self, box: Box) -> tuple[Box, ...]:
        blocks = self._blocks(box)
        # In the order of `shapes`, from which the names of stored tensors and the parts in `read` follow.
        boxes = [self.codes.box(box), self.scales.box(blocks)]
        if self.zero_points:
            boxes.append(self.zero_points.box(blocks))
        if self.group_of_column:
            boxes.append((box[1],))
        if self.factor:
            boxes.append((range(1),) * self.factor[1])
        boxes += [tuple(range(length) for length in shape) for _, shape in self.unread]
        return tuple(boxes)

    def read(self, parts: Sequence[torch.Tensor], box: Box) -> torch.Tensor:
        left = dict(zip(self.shapes(), parts, strict=True))
        blocks = self._blocks(box)
        scales = self.scales.unpack(left[self.scales.ending], blocks)
        # The dtype in which the format's library computes: training starts from the numbers that engines use.
        dtype = self.dtype or scales.dtype
        scales = scales.to(dtype)
        if self.exponent_bias is not None:
            scales = torch.exp2(scales - self.exponent_bias)
        if self.factor:
            factor = left[self.factor[0]].reshape(()).to(dtype)
            scales = scales * factor if self.multiplies else scales / factor
        rows = _block_of_each(box[0], self.block[0], blocks[0])
        columns = _block_of_each(box[1], self.block[1], blocks[1])
        if self.group_of_column:
            # Neighboring columns have unrelated groups (act-order). Their numbers are absolute, so `_blocks` reads all.
            columns = left[self.group_of_column].long()
        codes = self.codes.unpack(left[self.codes.ending], box)
        if self.values:
            codes = torch.tensor(self.values)[codes]
        numbers = codes.to(dtype)
        if self.zero_points:
            zero_points = self.zero_points.unpack(left[self.zero_points.ending], blocks) + self.zero_point
            numbers = numbers - zero_points.to(dtype)[rows][:, columns]
        elif self.zero_point:
            numbers = numbers - self.zero_point
        # Each scale is repeated over the rows and the columns of its block.
        return numbers * scales[rows][:, columns]

    def aligned(self, box: Box, shape: tuple[int, ...]) -> Box:
        rows, columns = self.block
        # A rank writes whole blocks in whole words: blocks of 1 x 32 in words of 8 rows make boxes of 8 x 32.
        packing = self.codes.packing
        if packing and packing.axis == 0:
            rows = lcm(rows, packing.per_word)
        if packing and packing.axis == 1:
            columns = lcm(columns, packing.per_word)
        return _whole(box[0], rows, shape[0]), _whole(box[1], columns, shape[1])

    def _blocks(self, box: Box) -> Box:
        """Return the blocks that contain a box; all blocks along columns if a table assigns columns to blocks."""
        columns = _blocks_of(box[1], self.block[1])
        if self.group_of_column:
            columns = range(self.grid[1])
        return _blocks_of(box[0], self.block[0]), columns


def _blocks_of(indices: range, size: int) -> range:
    """Return the blocks of `size` indices that contain a range.

    Example: with blocks of 8, indices 30 to 33 are in blocks 3 and 4.
    """
    return range(indices.start // size, (indices.stop - 1) // size + 1)


def _block_of_each(indices: range, size: int, blocks: range) -> torch.Tensor:
    """Return the block of each index, relative to the first of `blocks`."""
    return torch.arange(indices.start, indices.stop) // size - blocks.start


def _within(numbers: torch.Tensor, indices: range, per_word: int, axis: int) -> torch.Tensor:
    """Return the numbers at `indices` from those of the whole words that contain them."""
    return numbers.narrow(axis, indices.start % per_word, len(indices))


def _whole(indices: range, size: int, length: int) -> range:
    """Return the range extended to whole blocks, but not beyond `length`."""
    blocks = _blocks_of(indices, size)
    return range(blocks.start * size, min(blocks.stop * size, length))
