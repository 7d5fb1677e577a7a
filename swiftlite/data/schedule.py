"""Who computes which sequences of a step: a pure function of the lengths of the global batch.

The work of a sequence is `linear * length + square * length ** 2` (matrices, attention; `args.flops`). First sequences
go to data-parallel ranks so that their sums of work are level, then each rank spreads its own over micro-batches; the
ranks' micro-batches are ordered by work, so that at each index they are as level as they can be too. Moving the samples
is not done here: a framework whose every rank has all data, or that has its own exchange, can use this alone.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swiftlite.data.packing import check_lengths, pack


@dataclass(frozen=True)
class Schedule:
    """The sequences of one step, by index: `[micro-batch, rank]` slots of at most `packing_length` tokens.

    Attributes:
        order: int64 `[num_sequences]`; the sequences of micro-batch 0 on rank 0, on rank 1, ..., then of micro-batch 1.
        offsets: int64 `[num_micro_batches * data_parallel_size + 1]`; where each slot begins in `order`.
        work: float64 `[num_micro_batches, data_parallel_size]`, in units of the coefficients; 0 where a slot is empty.
    """

    order: np.ndarray
    offsets: np.ndarray
    work: np.ndarray

    @property
    def num_micro_batches(self) -> int:
        """Of every rank."""
        return self.work.shape[0]

    @property
    def data_parallel_size(self) -> int:
        return self.work.shape[1]

    def micro_batch(self, index: int, rank: int) -> np.ndarray:
        """Indices of a slot's sequences, ascending; empty only where there are fewer sequences than slots."""
        slot = index * self.data_parallel_size + rank
        return self.order[self.offsets[slot] : self.offsets[slot + 1]]

    def rank(self, rank: int) -> list[np.ndarray]:
        """The micro-batches of a rank."""
        return [self.micro_batch(index, rank) for index in range(self.num_micro_batches)]

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean: 1 is level, and the time that a step takes for want of it."""
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
) -> Schedule:
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
    by_size = np.argsort(-sizes, kind="stable")
    sizes_of, work_of = sizes.tolist(), work.tolist()

    dp = data_parallel_size
    number = max(1, -(-int(sizes.sum()) // (dp * packing_length)))
    while True:
        number = -(-number // num_multiple_of) * num_multiple_of
        ranks = _level(by_size.tolist(), work_of, dp, at_least=number)
        found = [_micro_batches(mine, sizes_of, work_of, number, packing_length) for mine in ranks]
        slots = [rank for rank in found if rank is not None]
        if len(slots) == dp:
            return _schedule(slots, work)
        number += 1


def _level(items: list[int], work: list[float], num_groups: int, at_least: int) -> list[list[int]]:
    """Each item, the most work first, to the group with the least so far; as many items as asked for in each group,
    if there are enough."""
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    heap = [(0.0, group) for group in range(num_groups)]
    missing = at_least * num_groups
    for left, item in zip(range(len(items), 0, -1), items, strict=True):
        if left == missing:  # what is left, the shortest sequences, goes where a micro-batch would be empty
            heap = [entry for entry in heap if len(groups[entry[1]]) < at_least]
            heapq.heapify(heap)
        so_far, group = heap[0]
        heapq.heapreplace(heap, (so_far + work[item], group))
        missing -= len(groups[group]) < at_least
        groups[group].append(item)
    return groups


def _micro_batches(
    items: list[int], sizes: list[int], work: list[float], number: int, packing_length: int
) -> list[list[int]] | None:
    """A rank's sequences, longest first, in this many micro-batches, most work first; None if they do not fit."""
    if sum(sizes[item] for item in items) > number * packing_length:
        return None
    slots = _level_within(items, sizes, work, number, packing_length)
    if slots is None:
        rows = pack([sizes[item] for item in items], packing_length)
        if len(rows) > number:
            return None
        slots = [[items[i] for i in rows[row].tolist()] for row in range(len(rows))]
        while len(slots) < min(number, len(items)):
            slots.sort(key=lambda slot: (len(slot) > 1, sum(work[item] for item in slot)))
            slot = slots.pop()
            slots += [slot[::2], slot[1::2]]
        slots += [[] for _ in range(number - len(slots))]
    return sorted(slots, key=lambda slot: -sum(work[item] for item in slot))


def _level_within(
    items: list[int], sizes: list[int], work: list[float], number: int, packing_length: int
) -> list[list[int]] | None:
    """As `_level`, in groups that hold so many tokens; None where that leaves an item without a place."""
    slots: list[list[int]] = [[] for _ in range(number)]
    rooms = [packing_length] * number
    heap = [(0.0, slot) for slot in range(number)]
    for item in items:
        full = []
        while heap and rooms[heap[0][1]] < sizes[item]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        so_far, slot = heap[0]
        heapq.heapreplace(heap, (so_far + work[item], slot))
        rooms[slot] -= sizes[item]
        slots[slot].append(item)
        for entry in full:
            heapq.heappush(heap, entry)
    return slots


def _schedule(ranks: list[list[list[int]]], work: np.ndarray) -> Schedule:
    """From the micro-batches of each rank."""
    slots = [sorted(slot) for together in zip(*ranks, strict=True) for slot in together]
    order = np.array([item for slot in slots for item in slot], np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(slot) for slot in slots])])
    sums = np.concatenate([[0.0], np.cumsum(work[order])])
    return Schedule(order, offsets, np.diff(sums[offsets]).reshape(-1, len(ranks)))
