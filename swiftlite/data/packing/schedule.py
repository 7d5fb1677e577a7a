"""Assign the sequences of a step to ranks and micro-batches, as a pure function of the lengths of the global batch.

The work of a sequence is `linear * length + square * length ** 2`, for matrix products and attention
(`plan/cost/flops.py`), and that of its images. First, sequences are assigned to data-parallel ranks with balanced total
work. Then each rank distributes its sequences over micro-batches. The micro-batches of each rank are ordered by work,
so that the ranks are also balanced in their first, second, ... micro-batch. This module does not move samples between
ranks. It can therefore be used in other frameworks, however their ranks exchange data.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from swiftlite.data.packing.packing import PackedRows, check_lengths, pack


@dataclass(frozen=True)
class MicroBatchSchedule:
    """The sequence indices of one step, divided into micro-batches of at most `packing_length` tokens.

    Every rank has the same number of micro-batches.

    Attributes:
        rows: the sequences of micro-batch 0 on rank 0, then those of micro-batch 0 on rank 1, and so on; then those of
            micro-batch 1 on rank 0, and so on.
        work: float64 `[num_micro_batches, data_parallel_size]`, in the unit of `linear` and `square`; 0 for an empty
            micro-batch.
    """

    rows: PackedRows
    work: np.ndarray

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each rank."""
        return self.work.shape[0]

    @property
    def data_parallel_size(self) -> int:
        return self.work.shape[1]

    def micro_batch(self, index: int, rank: int) -> np.ndarray:
        """Return the indices of the sequences in a micro-batch of a rank, ascending.

        The micro-batch is empty only if the number of sequences is smaller than the number of micro-batches of all
        ranks.
        """
        return self.rows[index * self.data_parallel_size + rank]

    def rank(self, rank: int) -> list[np.ndarray]:
        """Return the indices of the sequences in each micro-batch of a rank."""
        return [self.micro_batch(index, rank) for index in range(self.num_micro_batches)]

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank divided by the mean work; 1 is balanced.

        For example, with an imbalance of 1.2 a step takes about 1.2 times as long as a balanced step.
        """
        ranks = self.work.sum(axis=0)
        return float(ranks.max() / ranks.mean())


def schedule(
    lengths: Sequence[int] | np.ndarray,
    packing_length: int,
    data_parallel_size: int,
    *,
    linear: float = 1.0,
    square: float = 0.0,
    more_work: Sequence[float] = (),
    multiple: int = 1,
    num_multiple_of: int = 1,
) -> MicroBatchSchedule:
    """Assign the sequences of a global batch to micro-batches of data-parallel ranks. The result is the same on every
    rank.

    The number of micro-batches is the smallest that keeps ranks balanced.

    Args:
        lengths: number of tokens of each sequence of the global batch, at least one sequence.
        packing_length: maximum number of tokens of a micro-batch.
        linear, square: work per token and per squared token, in the same unit.
        more_work: further work of each sequence in this unit, such as that of its images; empty for none.
        multiple: multiple to which each sequence is padded; padding counts as tokens and as work.
        num_multiple_of: divisor of the number of micro-batches per rank; with virtual stages, the pipeline size.

    Raises:
        UserError: a sequence has no tokens or is longer than `packing_length`; the error names the sequence's index.
    """
    sizes = check_lengths(lengths, packing_length, multiple)
    work = linear * sizes + square * sizes.astype(np.float64) ** 2
    if len(more_work):
        work += np.asarray(more_work)
    sizes_list = sizes.tolist()
    work_list = work.tolist()
    # Equal work is ordered by length, and equal length by index: stable sorts give all ranks the same order.
    longest_first = np.argsort(-sizes, kind="stable")
    most_work_first = longest_first[np.argsort(-work[longest_first], kind="stable")].tolist()
    items = [_Item(index, sizes_list[index], work_list[index]) for index in most_work_first]

    # A lower bound: with no room left in any micro-batch. The loop ends at one sequence per micro-batch at the latest.
    num_micro_batches = max(1, -(-int(sizes.sum()) // (data_parallel_size * packing_length)))
    while True:
        num_micro_batches = -(-num_micro_batches // num_multiple_of) * num_multiple_of
        ranks = _level(items, data_parallel_size, at_least=num_micro_batches)
        # Largest first, because room is a matter of tokens. With images, the order of work is another one.
        by_size = [sorted(rank, key=lambda item: -item.size) for rank in ranks]
        cut = [_micro_batches(rank, num_micro_batches, packing_length) for rank in by_size]
        fitting = [micro_batches for micro_batches in cut if micro_batches is not None]
        if len(fitting) == data_parallel_size:
            return _as_schedule(fitting, work)
        num_micro_batches += 1


class _Item(NamedTuple):
    """A sequence: its index in the global batch, its number of tokens with padding, and its work."""

    index: int
    size: int
    work: float


_Group = list[_Item]


def _work_of(group: _Group) -> float:
    return sum(item.work for item in group)


def _level(items: Sequence[_Item], num_groups: int, at_least: int) -> list[_Group]:
    """Distribute items over groups with balanced work.

    Each item, most work first, goes to the group with the least work. Each group gets `at_least` items, if there are
    enough.

    Example: work of 8, 6, 4, 4, 2 in two groups. 8 and 6 go to one group each. Both 4 and the 2 go to the group with
    less work (6 + 4 = 10, 8 + 4 = 12, 10 + 2 = 12). The groups are `[8, 4]` and `[6, 4, 2]`.
    """
    groups: list[_Group] = [[] for _ in range(num_groups)]
    heap = [(0.0, number) for number in range(num_groups)]  # work so far, index of the group
    num_lacking = at_least * num_groups
    for position, item in enumerate(items):
        if len(items) - position == num_lacking:
            # All remaining items, the shortest sequences, are needed for groups below the minimum.
            heap = [(so_far, number) for so_far, number in heap if len(groups[number]) < at_least]
            heapq.heapify(heap)
        so_far, number = heap[0]
        heapq.heapreplace(heap, (so_far + item.work, number))
        if len(groups[number]) < at_least:
            num_lacking -= 1
        groups[number].append(item)
    return groups


def _micro_batches(items: Sequence[_Item], number: int, packing_length: int) -> list[_Group] | None:
    """Group a rank's sequences into `number` micro-batches, ordered by work, most work first.

    None if the sequences do not fit into this number of micro-batches.
    """
    if sum(item.size for item in items) > number * packing_length:
        return None
    groups = _level_within(items, number, packing_length)
    if groups is None:
        # Tighter, but with unequal work: only if the balanced groups have no room.
        groups = _packed(items, number, packing_length)
    if groups is None:
        return None
    return sorted(groups, key=lambda group: -_work_of(group))


def _level_within(items: Sequence[_Item], number: int, packing_length: int) -> list[_Group] | None:
    """Distribute items with balanced work like `_level`, with at most `packing_length` tokens per group.

    None if an item does not fit into any group.

    Example: items of 5, 4, 3 and 2 tokens, which are also their work, in two groups of 7 tokens. The first three give
    `[5]` and `[4, 3]`; 2 goes to the first group, which has less work. With 5, 4, 3 and 3, the second 3 does not fit,
    so the result is None.
    """
    groups: list[_Group] = [[] for _ in range(number)]
    rooms = [packing_length] * number
    heap = [(0.0, group) for group in range(number)]  # work so far, and the group
    for item in items:
        too_full = []
        while heap and rooms[heap[0][1]] < item.size:
            too_full.append(heapq.heappop(heap))
        if not heap:
            return None
        so_far, chosen = heap[0]
        heapq.heapreplace(heap, (so_far + item.work, chosen))
        rooms[chosen] -= item.size
        groups[chosen].append(item)
        for entry in too_full:  # they can have room for shorter items
            heapq.heappush(heap, entry)
    return groups


def _packed(items: Sequence[_Item], number: int, packing_length: int) -> list[_Group] | None:
    """Group sequences by best-fit decreasing like `packing.pack`; None if this needs more than `number` groups."""
    rows = pack([item.size for item in items], packing_length)
    if len(rows) > number:
        return None
    groups = [list(map(items.__getitem__, row)) for row in rows]
    while len(groups) < min(number, len(items)):  # fill an empty micro-batch with half of the one with the most work
        groups.sort(key=lambda group: (len(group) > 1, _work_of(group)))
        most = groups.pop()
        groups += [most[::2], most[1::2]]
    groups += [[] for _ in range(number - len(groups))]
    return groups


def _as_schedule(ranks: Sequence[Sequence[_Group]], work: np.ndarray) -> MicroBatchSchedule:
    """Create the schedule from the micro-batches of each rank.

    Example: rank 0 has `[[0], [2]]`, rank 1 has `[[3], [4, 1]]`. The first micro-batch of both ranks is followed by the
    second of both: `[0]`, `[3]`, `[2]`, `[1, 4]`. `order` is `[0, 3, 2, 1, 4]` and `offsets` is `[0, 1, 2, 3, 5]`.
    """
    groups = itertools.chain(*zip(*ranks, strict=True))
    indices = [sorted(item.index for item in group) for group in groups]
    order = np.array(list(itertools.chain(*indices)), np.int64)
    offsets = np.array([0, *itertools.accumulate(map(len, indices))])
    # Not `np.add.reduceat`, which gives an empty micro-batch the work of the sequence at its offset.
    work_before = np.concatenate([[0.0], np.cumsum(work[order])])
    work_of_groups = np.diff(work_before[offsets])
    return MicroBatchSchedule(PackedRows(order, offsets), work_of_groups.reshape(-1, len(ranks)))
