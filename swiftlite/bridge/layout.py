"""Layouts: in which order the numbers of HF tensors stand in one Megatron parameter. Pure arithmetic on lengths.

Every layout is a list of segments along one axis: a Megatron parameter is pieces of HF tensors laid end to end. So one
description loads, saves, slices for a rank and proves that nothing is missing. Which rank holds what is not known here
(`placement.py`); how a family uses layouts stands in its rows (`rows.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

ZEROS = -1


class Segment(NamedTuple):
    """`length` numbers along the axis, beginning at `start` of HF tensor number `source` (or zeros)."""

    source: int
    start: int
    length: int


class Piece(NamedTuple):
    """A segment, or the part of it that a rank holds, and where it begins in that rank's parameter."""

    source: int
    start: int
    length: int
    local_start: int


class Layout(Protocol):
    """What a row needs of a layout."""

    @property
    def axis(self) -> int:
        """The axis along which HF tensors are cut and joined; all other axes are the same on both sides."""
        ...

    def segments(self, lengths: Sequence[int], total: int, tp_size: int) -> list[Segment]:
        """The whole (not sharded) Megatron parameter from begin to end.

        Args:
            lengths: length along the axis of each HF tensor of the row.
            total: length along the axis of the Megatron parameter, all tensor-parallel ranks together.
            tp_size: ranks that share the parameter.
        """
        ...


@dataclass(frozen=True)
class Interleave:
    """Each HF tensor is cut into `units` equal parts; part 0 of every tensor comes first, then part 1 of every tensor.

    One unit is a plain copy, or a concatenation. One unit per query group is megatron-core's `linear_qkv`:
    [queries of the group, its key, its value], group after group. With two groups, 4 queries, 2 keys and 2 values are
    q0 q1 k0 v0 q2 q3 k1 v1.

    Args:
        units: number of parts; None stands for one per tensor-parallel rank, as in megatron-core's `linear_fc1`, where
            every rank holds [its gate, its up].
    """

    units: int | None = 1
    axis: int = 0

    def segments(self, lengths: Sequence[int], total: int, tp_size: int) -> list[Segment]:
        units = tp_size if self.units is None else self.units
        if any(length % units for length in lengths):
            raise ValueError(f"lengths {list(lengths)} do not divide into {units} parts")
        parts = [length // units for length in lengths]
        return [Segment(i, unit * part, part) for unit in range(units) for i, part in enumerate(parts)]


@dataclass(frozen=True)
class SwapHalves:
    """The second half of the one HF tensor, then the first."""

    axis: int

    def segments(self, lengths: Sequence[int], total: int, tp_size: int) -> list[Segment]:
        (length,) = lengths
        if length % 2:
            raise ValueError(f"length {length} has no halves")
        return [Segment(0, length // 2, length // 2), Segment(0, 0, length // 2)]


@dataclass(frozen=True)
class PadEnd:
    """The one HF tensor, then zeros up to the length of the Megatron parameter (a vocabulary padded for TP)."""

    axis: int = 0

    def segments(self, lengths: Sequence[int], total: int, tp_size: int) -> list[Segment]:
        (length,) = lengths
        padding = [Segment(ZEROS, 0, total - length)] if total > length else []
        return [Segment(0, 0, length), *padding]


COPY = Interleave(1)
GATE_UP = Interleave(None)


def clip(segments: Sequence[Segment], begin: int, end: int) -> list[Piece]:
    """The pieces of `segments` that fall into positions [begin, end), with their places counted from `begin`.

    Example: segments of 3 numbers of tensor 0 and 3 of tensor 1, and positions [2, 4): the last number of tensor 0 at
    place 0, the first of tensor 1 at place 1.
    """
    pieces = []
    position = 0
    for source, start, length in segments:
        first = max(begin, position)
        last = min(end, position + length)
        if first < last:
            pieces.append(Piece(source, start + first - position, last - first, first - begin))
        position += length
    return pieces


def covers(segments: Sequence[Segment], lengths: Sequence[int], total: int) -> bool:
    """Whether the segments fill `total` positions and use every number of every HF tensor exactly once."""
    if sum(segment.length for segment in segments) != total:
        return False
    used: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for source, start, length in segments:
        if source != ZEROS:
            used[source].append((start, start + length))
    for length, spans in zip(lengths, used, strict=True):
        position = 0
        for first, last in sorted(spans):
            if first != position:
                return False
            position = last
        if position != length:
            return False
    return True
