"""Describe how Hugging Face tensors are concatenated in one Megatron parameter, by computing with lengths only.

A Megatron parameter consists of ranges of HF tensors, placed end to end along one axis. A join is the list of these
ranges. Joins are used to load, to save, to slice for a rank, and to check that no element is missing. The bridge rows
of a family (`rows.py`) select the join of each parameter, and `placement.py` determines the part of each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

ZEROS = -1


class SourceRange(NamedTuple):
    """`length` elements of HF tensor number `source` along the axis, from index `start` on; or this number of zeros."""

    source: int
    start: int
    length: int


class Piece(NamedTuple):
    """A rank's part of a `SourceRange`, and the position where it starts in the rank's part of the parameter."""

    source: int
    start: int
    length: int
    local_start: int


class Join(Protocol):
    """The interface of a join."""

    @property
    def axis(self) -> int:
        """The axis along which HF tensors are joined; the sizes of all other axes are equal."""
        ...

    def source_ranges(self, lengths: Sequence[int], total: int, tp_size: int) -> list[SourceRange]:
        """Return the ranges of the whole Megatron parameter in order.

        Args:
            lengths: length along the axis of each HF tensor of the row.
            total: length along the axis of the whole Megatron parameter.
            tp_size: number of tensor-parallel ranks that split the parameter.
        """
        ...


@dataclass(frozen=True)
class Interleave:
    """Split each HF tensor into `units` equal parts, and interleave the parts.

    The order is part 0 of every tensor, then part 1 of every tensor, and so on. With one unit, this is a copy of one
    tensor, or a concatenation of several. One unit per query group is megatron-core's `linear_qkv`: [queries of the
    group, its key, its value], group after group. For example, 4 queries, 2 keys and 2 values in two groups become q0
    q1 k0 v0 q2 q3 k1 v1.

    Args:
        units: number of parts; None means one per tensor-parallel rank, as in megatron-core's `linear_fc1`, where each
            rank holds [gate, up] of its part.
    """

    units: int | None = 1
    axis: int = 0

    def source_ranges(self, lengths: Sequence[int], total: int, tp_size: int) -> list[SourceRange]:
        units = tp_size if self.units is None else self.units
        if any(length % units for length in lengths):
            raise ValueError(f"lengths {list(lengths)} do not divide into {units} parts")
        parts = [length // units for length in lengths]
        # 8 rows of queries and 2 of keys in 2 units: queries 0 to 3 and key 0, then queries 4 to 7 and key 1.
        ranges = []
        for unit in range(units):
            ranges += [SourceRange(source, unit * part, part) for source, part in enumerate(parts)]
        return ranges


@dataclass(frozen=True)
class InterleaveBlocks:
    """Split each block of each HF tensor into `units` equal parts, and interleave the parts.

    Part 0 of every block comes first. For example, with two units, one HF tensor of the blocks q0 q1, k0 k1 and v0 v1
    v2 v3 becomes q0 k0 v0 v1 q1 k1 v2 v3.

    Args:
        units: number of parts; None means one per tensor-parallel rank, as for `Interleave`.
        blocks: lengths of the blocks of each HF tensor.
    """

    units: int | None
    blocks: tuple[tuple[int, ...], ...]
    axis: int = 0

    def source_ranges(self, lengths: Sequence[int], total: int, tp_size: int) -> list[SourceRange]:
        if list(lengths) != [sum(blocks) for blocks in self.blocks]:
            raise ValueError(f"lengths {list(lengths)} are not those of the blocks {self.blocks}")
        units = tp_size if self.units is None else self.units
        if any(length % units for length in chain(*self.blocks)):
            raise ValueError(f"blocks {self.blocks} do not divide into {units} parts")
        ranges = []
        # One unit per query group for the fused qkv_proj of Phi-3, and one per rank for its gate_up_proj.
        for unit in range(units):
            for source, blocks in enumerate(self.blocks):
                ranges += self._parts(source, blocks, unit, units)
        return ranges

    def _parts(self, source: int, blocks: Sequence[int], unit: int, units: int) -> list[SourceRange]:
        """Return part number `unit` of each block of one HF tensor."""
        parts = []
        block_start = 0
        for length in blocks:
            part = length // units
            parts.append(SourceRange(source, block_start + unit * part, part))
            block_start += length
        return parts


@dataclass(frozen=True)
class GatedQkv:
    """megatron-core's `linear_qkv` with gates: [queries of the group, their gates, its key, its value], group by group.

    The first HF tensor has each query before its gate (q0 g0 q1 g1 q2 g2 q3 g3), the others are the keys (k0 k1) and
    the values (v0 v1). With two groups, they become q0 q1 g0 g1 k0 v0 q2 q3 g2 g3 k1 v1.

    Args:
        groups: key-value heads.
        head_dim: size of a head.
    """

    groups: int
    head_dim: int
    axis: int = 0

    def source_ranges(self, lengths: Sequence[int], total: int, tp_size: int) -> list[SourceRange]:
        size = self.head_dim
        if lengths[0] % (2 * size * self.groups) or list(lengths[1:]) != [self.groups * size] * 2:
            raise ValueError(f"lengths {list(lengths)} are not those of {self.groups} groups of heads of size {size}")
        # Query number i starts at 2 * i * size, and its gate at (2 * i + 1) * size.
        queries = lengths[0] // (2 * size) // self.groups  # per group
        ranges = []
        for group in range(self.groups):
            first = group * queries
            for offset in (0, size):
                for query in range(first, first + queries):
                    ranges.append(SourceRange(0, 2 * query * size + offset, size))
            ranges += [SourceRange(source, group * size, size) for source in (1, 2)]
        return ranges


@dataclass(frozen=True)
class SwapHalves:
    """A single HF tensor with its halves swapped: the second half, then the first."""

    axis: int

    def source_ranges(self, lengths: Sequence[int], total: int, tp_size: int) -> list[SourceRange]:
        (length,) = lengths
        if length % 2:
            raise ValueError(f"length {length} has no halves")
        return [SourceRange(0, length // 2, length // 2), SourceRange(0, 0, length // 2)]


@dataclass(frozen=True)
class PadEnd:
    """A single HF tensor, padded with zeros to the length of the Megatron parameter, such as a vocabulary that is
    padded for TP.
    """

    axis: int = 0

    def source_ranges(self, lengths: Sequence[int], total: int, tp_size: int) -> list[SourceRange]:
        (length,) = lengths
        ranges = [SourceRange(0, 0, length)]
        if total > length:
            ranges.append(SourceRange(ZEROS, 0, total - length))
        return ranges


COPY = Interleave(1)
GATE_UP = Interleave(None)


def clip(source_ranges: Sequence[SourceRange], begin: int, end: int) -> list[Piece]:
    """Return the parts of `source_ranges` at the positions [begin, end) of the parameter, with offsets relative to
    `begin`.

    Example: for 3 elements of tensor 0, then 3 of tensor 1, and positions [2, 4), the result is the last element of
    tensor 0 at offset 0 and the first element of tensor 1 at offset 1.
    """
    pieces = []
    position = 0
    for source, start, length in source_ranges:
        first = max(begin, position)
        last = min(end, position + length)
        if first < last:
            pieces.append(Piece(source, start + first - position, last - first, first - begin))
        position += length
    return pieces


def covers(source_ranges: Sequence[SourceRange], lengths: Sequence[int], total: int) -> bool:
    """Return whether the ranges fill `total` positions and use every index of every HF tensor exactly once."""
    if sum(one.length for one in source_ranges) != total:
        return False
    used: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for source, start, length in source_ranges:
        if source != ZEROS:
            used[source].append((start, start + length))
    for length, spans in zip(lengths, used, strict=True):
        position = 0
        # Sorted by position in the HF tensor: a join can use the parts in any order, but must leave no gap.
        for first, last in sorted(spans):
            if first != position:
                return False
            position = last
        if position != length:
            return False
    return True
