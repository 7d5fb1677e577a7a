"""Who computes which sequences of a step: a pure function of the lengths of the global batch.

The work of a sequence is `linear * length + square * length ** 2` (matrices, attention; `estimate/flops.py`). First the
sequences go to data-parallel ranks so that their sums of work are level, then each rank spreads its own over
micro-batches. The micro-batches of a rank are ordered by work, so that at each index ranks are as level as they can be
too. Moving the samples is not done here: a framework whose every rank has all data, or that has its own exchange, can
use this alone.
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
    """The sequences of one step, by index: micro-batches of at most `packing_length` tokens, as many on every rank.

    Attributes:
        rows: the sequences of micro-batch 0 on rank 0, on rank 1, ..., then of micro-batch 1.
        work: float64 `[num_micro_batches, data_parallel_size]`, in units of the coefficients; 0 if empty.
    """

    rows: PackedRows
    work: np.ndarray

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return self.work.shape[0]

    @property
    def data_parallel_size(self) -> int:
        return self.work.shape[1]

    def micro_batch(self, index: int, rank: int) -> np.ndarray:
        """Return the indices of the sequences of a rank's micro-batch, ascending.

        It is empty only where there are fewer sequences than micro-batches of all ranks.
        """
        return self.rows[index * self.data_parallel_size + rank]

    def rank(self, rank: int) -> list[np.ndarray]:
        """Return the sequences of each micro-batch of a rank."""
        return [self.micro_batch(index, rank) for index in range(self.num_micro_batches)]

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank divided by the mean; 1 is balanced. A step takes this factor longer than a balanced
        one."""
        ranks = self.work.sum(axis=0)
        return float(ranks.max() / ranks.mean())


def schedule(
    lengths: Sequence[int] | np.ndarray,
    packing_length: int,
    data_parallel_size: int,
    *,
    linear: float = 1.0,
    square: float = 0.0,
    multiple: int = 1,
    num_multiple_of: int = 1,
) -> MicroBatchSchedule:
    """Assign the sequences of a global batch to micro-batches of data-parallel ranks; the same on every process.

    There are as few micro-batches as level ranks allow.

    Args:
        lengths: tokens of each sequence of the global batch, at least one sequence.
        packing_length: most tokens of a micro-batch.
        linear, square: work per token and per token squared, in any one unit.
        multiple: what each sequence will be padded to; the padding counts, as tokens and as work.
        num_multiple_of: what divides the number of micro-batches: the pipeline's size, with virtual stages.

    Raises:
        UserError: see `packing.check_lengths`.
    """
    sizes = check_lengths(lengths, packing_length, multiple)
    work = linear * sizes + square * sizes.astype(np.float64) ** 2
    sizes_list = sizes.tolist()
    work_list = work.tolist()
    longest_first = np.argsort(-sizes, kind="stable").tolist()
    items = [_Item(index, sizes_list[index], work_list[index]) for index in longest_first]

    num_micro_batches = max(1, -(-int(sizes.sum()) // (data_parallel_size * packing_length)))
    while True:
        num_micro_batches = -(-num_micro_batches // num_multiple_of) * num_multiple_of
        ranks = _level(items, data_parallel_size, at_least=num_micro_batches)
        cut = [_micro_batches(rank, num_micro_batches, packing_length) for rank in ranks]
        fitting = [micro_batches for micro_batches in cut if micro_batches is not None]
        if len(fitting) == data_parallel_size:
            return _as_schedule(fitting, work)
        num_micro_batches += 1


class _Item(NamedTuple):
    """A sequence: its index in the global batch, its padded tokens, its work."""

    index: int
    size: int
    work: float


_Group = list[_Item]


def _work_of(group: _Group) -> float:
    return sum(item.work for item in group)


def _level(items: Sequence[_Item], num_groups: int, at_least: int) -> list[_Group]:
    """Distribute items over groups with balanced work: each item, most work first, goes to the group with the least
    work.

    Each group gets at least this minimum of items, if there are enough.

    Example: work of 8, 6, 4, 4, 2 in two groups. 8 and 6 go to one group each, each 4 to the group with less work
    (6 + 4 = 10, then 8 + 4 = 12), and so does 2: the groups are `[8, 4]` and `[6, 4, 2]`.
    """
    groups: list[_Group] = [[] for _ in range(num_groups)]
    heap = [(0.0, number) for number in range(num_groups)]  # work so far, and the index of the group
    num_lacking = at_least * num_groups
    for position, item in enumerate(items):
        if len(items) - position == num_lacking:
            # All that are left, the shortest sequences, are needed by groups that lack some.
            heap = [(so_far, number) for so_far, number in heap if len(groups[number]) < at_least]
            heapq.heapify(heap)
        so_far, number = heap[0]
        heapq.heapreplace(heap, (so_far + item.work, number))
        if len(groups[number]) < at_least:
            num_lacking -= 1
        groups[number].append(item)
    return groups


def _micro_batches(items: Sequence[_Item], number: int, packing_length: int) -> list[_Group] | None:
    """Group a rank's sequences, longest first, into this many micro-batches, most work first; None if they do not
    fit."""
    if sum(item.size for item in items) > number * packing_length:
        return None
    groups = _level_within(items, number, packing_length)
    if groups is None:
        groups = _packed(items, number, packing_length)
    if groups is None:
        return None
    return sorted(groups, key=lambda group: -_work_of(group))


def _level_within(items: Sequence[_Item], number: int, packing_length: int) -> list[_Group] | None:
    """Group as `_level` does, with at most `packing_length` tokens per group; None if an item does not fit.

    Example: tokens 5, 4, 3, 2 as work, two groups of 7. The first three give `[5]` and `[4, 3]`; 2 goes to the first,
    which has less work. With 5, 4, 3, 3 the second 3 has no place: None.
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
        for entry in too_full:  # they may have room for shorter items
            heapq.heappush(heap, entry)
    return groups


def _packed(items: Sequence[_Item], number: int, packing_length: int) -> list[_Group] | None:
    """Group by length alone, as `packing.pack` does; None if that takes more than `number` groups."""
    rows = pack([item.size for item in items], packing_length)
    if len(rows) > number:
        return None
    groups = [list(map(items.__getitem__, row)) for row in rows]
    while len(groups) < min(number, len(items)):  # a micro-batch would be empty: halve the one with the most work
        groups.sort(key=lambda group: (len(group) > 1, _work_of(group)))
        most = groups.pop()
        groups += [most[::2], most[1::2]]
    groups += [[] for _ in range(number - len(groups))]
    return groups


def _as_schedule(ranks: Sequence[Sequence[_Group]], work: np.ndarray) -> MicroBatchSchedule:
    """Build the schedule from each rank's micro-batches.

    Example: rank 0 has `[[0], [2]]`, rank 1 has `[[3], [4, 1]]`. The first of both ranks come first, then the second of
    both, `[0]`, `[3]`, `[2]`, `[1, 4]`: `order` is `[0, 3, 2, 1, 4]` and `offsets` is `[0, 1, 2, 3, 5]`.
    """
    groups = itertools.chain(*zip(*ranks, strict=True))
    indices = [sorted(item.index for item in group) for group in groups]
    order = np.array(list(itertools.chain(*indices)), np.int64)
    offsets = np.array([0, *itertools.accumulate(map(len, indices))])
    work_before = np.concatenate([[0.0], np.cumsum(work[order])])
    work_of_groups = np.diff(work_before[offsets])
    return MicroBatchSchedule(PackedRows(order, offsets), work_of_groups.reshape(-1, len(ranks)))
