"""Pack sequences into rows of `packing_length` tokens by best-fit decreasing, for a whole dataset or a stream.

All functions depend only on lengths, and sequences are never split. `batch.py` creates the tensors of packed rows, and
`schedule.py` assigns sequences to ranks.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from swiftlite.base.errors import UserError


@dataclass(frozen=True)
class PackedRows:
    """Rows of sequence indices, stored as two arrays.

    Attributes:
        order: int64 `[num_sequences]`; the sequences of row 0, then those of row 1, ...
        offsets: int64 `[num_rows + 1]`; row r is `order[offsets[r] : offsets[r + 1]]`.
    """

    order: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Return the indices of a row's sequences, ascending."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.order[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True)
class SingleRows:
    """Rows of one sequence each, in order: `PackedRows` without arrays.

    Attributes:
        num_rows: number of rows and of sequences.
    """

    num_rows: int

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> np.ndarray:
        """Return the index of a row's sequence."""
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        return np.array([row])


def padded(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Round lengths up to a multiple, so that ranks can split each sequence (`plan.layout.sequence_multiple`)."""
    return -(-lengths // multiple) * multiple


def check_lengths(lengths: Sequence[int] | np.ndarray, packing_length: int, multiple: int = 1) -> np.ndarray:
    """Return padded lengths, int64 `[num_sequences]`.

    Raises:
        UserError: a sequence has no tokens or is longer than a row; the error names the sequence's index.
    """
    given = np.asarray(lengths, np.int64)
    result = padded(given, multiple)
    wrong = np.flatnonzero((given < 1) | (result > packing_length))
    if not wrong.size:
        return result
    index = wrong[0]
    if given[index] < 1:
        raise UserError(f"sequence {index} has {given[index]} tokens; it must have at least 1")
    problem = f"sequence {index} has {given[index]} tokens"
    if multiple > 1:
        problem += f", {result[index]} when padded to a multiple of {multiple}"
    raise UserError(
        f"{problem}: over --packing_length {packing_length}",
        f"use --packing_length {result.max()}, or --max_length {packing_length // multiple * multiple}",
    )


def pack(lengths: Sequence[int] | np.ndarray, packing_length: int, *, multiple: int = 1) -> PackedRows:
    """Pack by best-fit decreasing: each sequence, longest first, goes into the fullest row with room for it.

    Sequences of the same length are interchangeable, and so are rows with the same room. The loop therefore runs over
    distinct pairs of length and room, and the indices of sequences are assigned afterwards.

    Example: lengths `[5, 3, 8, 2, 2, 10, 10]` into rows of 10 tokens.

        length  sequences  rows that they go into, numbered as they are opened
        10      5, 6       0 and 1, both new and full now
        8       2          2, new, with room for 2 more
        5       0          3, new, with room for 5 more
        3       1          3, the fullest with room for it, now for 2 more
        2       3, 4       3 and 2, both full now

    In the order of their first sequences, the rows are `[0, 1, 3]`, `[2, 4]`, `[5]`, `[6]`.

    Args:
        lengths: number of tokens of each sequence, at least 1.
        packing_length: maximum number of tokens of a row.
        multiple: multiple to which each sequence is padded; padding counts.

    Returns:
        Rows in the order of their first sequences. Without shuffling, the data therefore approximately keeps its order.

    Raises:
        UserError: a sequence has no tokens or is longer than a row; the error names the sequence's index.
    """
    sizes = check_lengths(lengths, packing_length, multiple)
    if not len(sizes):
        return PackedRows(np.empty(0, np.int64), np.zeros(1, np.int64))
    by_size = np.argsort(-sizes, kind="stable")  # equal sizes remain in order
    dealt, num_rows = _deal(sizes, packing_length)
    first_rows, num_rows_dealt, num_sequences = np.array(dealt).T
    row_numbers = join_ranges(first_rows, num_rows_dealt)
    row_of = np.empty(len(sizes), np.int64)
    # Each step of `dealt` hands out the next sequences of `by_size`: 2 rows of 3 sequences are r r r s s s.
    row_of[by_size] = np.repeat(row_numbers, np.repeat(num_sequences, num_rows_dealt))
    return _in_order(row_of, num_rows)


def _deal(sizes: np.ndarray, packing_length: int) -> tuple[list[tuple[int, int, int]], int]:
    """Assign sequences to rows, longest first, by length only.

    Returns:
        For each step of the assignment (first row, number of rows, sequences per row), and the number of rows.
    """
    distinct, counts = np.unique(sizes, return_counts=True)
    num_rows = 0
    open_rows = _OpenRows(smallest_size=int(distinct[0]))
    dealt: list[tuple[int, int, int]] = []
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            room, rows = open_rows.take(size)
            if not rows:
                room = packing_length
                # Enough for all remaining sequences of this size, which thus need no further pass.
                num_new = -(-count // (room // size))
                rows = range(num_rows, num_rows + num_new)
                num_rows += num_new
            # The fullest row with room for one sequence remains the fullest afterwards, so it is filled in one step.
            most = room // size
            num_full = min(len(rows), count // most)
            full, others = rows[:num_full], rows[num_full:]
            dealt.append((full.start, num_full, most))
            open_rows.put(room - most * size, full)
            count -= num_full * most
            if others and count:  # fewer than `most` are left for one more row
                dealt.append((others.start, 1, count))
                open_rows.put(room - count * size, others[:1])
                others = others[1:]
                count = 0
            open_rows.put(room, others)
    return dealt, num_rows


class _OpenRows:
    """Rows that are not full, by their room: `{3: [range(0, 5)]}` are rows 0 to 4 with room for 3 tokens each.

    Args:
        smallest_size: size of the smallest sequence; rows with less room count as full.
    """

    def __init__(self, smallest_size: int):
        self._smallest_size = smallest_size
        self._rooms: list[int] = []  # the keys of `_rows`, ascending
        self._rows: dict[int, list[range]] = {}

    def put(self, room: int, rows: range) -> None:
        """Record that these rows have room for `room` tokens."""
        if not rows or room < self._smallest_size:
            return
        if room not in self._rows:
            bisect.insort(self._rooms, room)
            self._rows[room] = []
        self._rows[room].append(rows)

    def take(self, size: int) -> tuple[int, range]:
        """Remove the rows with the smallest room that holds `size` tokens; return this room and the rows.

        The rows are empty if there is no room of this size.
        """
        place = bisect.bisect_left(self._rooms, size)
        if place == len(self._rooms):
            return 0, range(0)
        room = self._rooms[place]
        rows = self._rows[room].pop()
        if not self._rows[room]:
            del self._rows[room]
            del self._rooms[place]
        return room, rows


def join_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate ranges: starts `[5, 0]` and lengths `[3, 2]` give `[5, 6, 7, 0, 1]`."""
    places = np.cumsum(lengths) - lengths  # start of each range in the result: [0, 3]
    return np.repeat(starts - places, lengths) + np.arange(lengths.sum())


def _in_order(row_of: np.ndarray, num_rows: int) -> PackedRows:
    """Return the rows, renumbered in the order of their first sequences.

    Example: in `[1, 0, 1]` sequences 0 and 2 are in row 1. This row comes first, because sequence 0 does: the result is
    `[0, 2]`, `[1]`.

    Args:
        row_of: `[num_sequences]`, the row of each sequence; every row below `num_rows` has a sequence.
    """
    order = np.argsort(row_of, kind="stable")  # sequences of row 0, then of row 1, ...: [1, 0, 2]
    counts = np.bincount(row_of, minlength=num_rows)  # [1, 2]
    starts = np.cumsum(counts) - counts  # start of each row in `order`: [0, 1]
    by_first = np.argsort(order[starts])  # previous row numbers in the new order: [1, 0]
    counts = counts[by_first]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return PackedRows(order[join_ranges(starts[by_first], counts)], offsets)


class StreamSample(NamedTuple):
    """A sample of a stream: number of its row in the files, its index within the row, and its length in tokens."""

    row: int
    piece: int
    length: int


class RowStream(Iterator[list[StreamSample]]):
    """Rows packed from a stream of samples with a bounded look-ahead.

    Whenever no packed row is ready, the buffer is filled and packed. The fuller half of the rows becomes ready. The row
    that contains the oldest sample also becomes ready, so that no sample waits forever. All other samples stay in the
    buffer. At the end of the stream all samples are packed. The result depends only on the lengths.

    Attributes:
        waiting: the buffer, oldest first.
        ready: packed rows, next first.

    Args:
        samples: the stream: position and length of each sample.
        packing_length: maximum number of tokens in a row.
        buffer_size: maximum number of samples in the buffer.
        multiple: multiple to which each sequence is padded; padding counts.
        waiting: to continue an earlier stream, its buffer; `samples` are then the samples that the earlier stream had
            not read yet.
        ready: to continue an earlier stream, its packed rows.
    """

    def __init__(
        self,
        samples: Iterable[StreamSample],
        packing_length: int,
        buffer_size: int = 1000,
        *,
        multiple: int = 1,
        waiting: Iterable[StreamSample] = (),
        ready: Iterable[list[StreamSample]] = (),
    ):
        self.packing_length = packing_length
        self.buffer_size = buffer_size
        self.multiple = multiple
        self.waiting = list(waiting)
        self.ready = deque(ready)
        self._samples = iter(samples)

    def __next__(self) -> list[StreamSample]:
        if not self.ready:
            self._pack()
        if not self.ready:
            raise StopIteration
        return self.ready.popleft()

    def _pack(self) -> None:
        wanted = self.buffer_size - len(self.waiting)
        fresh = list(itertools.islice(self._samples, wanted))
        self.waiting += fresh
        lengths = np.array([entry.length for entry in self.waiting], np.int64)
        rows = pack(lengths, self.packing_length, multiple=self.multiple)
        is_ready = np.ones(len(rows), bool)
        if len(fresh) == wanted:  # otherwise the stream has ended
            fill = np.add.reduceat(padded(lengths, self.multiple)[rows.order], rows.offsets[:-1])
            fullest_first = np.argsort(-fill, kind="stable")
            is_ready[fullest_first[(len(rows) + 1) // 2 :]] = False
            is_ready[0] = True  # the oldest sample is in row 0, because rows are in the order of their first samples

        staying: list[int] = []
        for row, goes_out in enumerate(is_ready.tolist()):
            indices = rows[row].tolist()
            if goes_out:
                self.ready.append([self.waiting[index] for index in indices])
            else:
                staying += indices
        # Sorted, because the oldest sample must remain the first: its row is the next one to become ready.
        self.waiting = [self.waiting[index] for index in sorted(staying)]
