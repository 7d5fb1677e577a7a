"""Which sequences share a row of `packing_length` tokens: best-fit-decreasing, over all lengths or over a stream.

Pure functions of lengths; a sequence is never split. Packed rows become tensors in `batch.py`; who computes which
sequences of a step is `schedule.py`'s.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from swiftlite.data.sample import Sample
from swiftlite.errors import UserError


@dataclass(frozen=True)
class Rows:
    """Rows of sequences, by index; a million sequences are two arrays.

    Attributes:
        order: int64 `[num_sequences]`; the sequences of row 0, then those of row 1, ...
        offsets: int64 `[num_rows + 1]`; row r is `order[offsets[r] : offsets[r + 1]]`.
    """

    order: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Indices of a row's sequences, ascending."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.order[self.offsets[row] : self.offsets[row + 1]]


def padded(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Lengths rounded up, so that ranks can share each sequence by position (`args.layout.length_multiple`)."""
    return -(-lengths // multiple) * multiple


def check_lengths(lengths: Sequence[int] | np.ndarray, packing_length: int, multiple: int = 1) -> np.ndarray:
    """Padded lengths, int64 `[num_sequences]`.

    Raises:
        UserError: a sequence without tokens, or too long for a row even alone; names its index.
    """
    given = np.asarray(lengths, np.int64)
    result = padded(given, multiple)
    if (wrong := np.flatnonzero((given < 1) | (result > packing_length))).size:
        first = wrong[0]
        if given[first] < 1:
            raise UserError(f"sequence {first} has {given[first]} tokens; a packed row has none to give it")
        rounded = f", {result[first]} when padded to a multiple of {multiple}" if multiple > 1 else ""
        longest = result.max()
        raise UserError(
            f"sequence {first} has {given[first]} tokens{rounded}: over --packing_length {packing_length}",
            f"--packing_length {longest} takes all; or cut them: --max_length {packing_length // multiple * multiple}",
        )
    return result


def pack(lengths: Sequence[int] | np.ndarray, packing_length: int, *, multiple: int = 1) -> Rows:
    """Best-fit-decreasing: each sequence, the longest first, goes into the fullest row that still has room for it.

    Sequences of one length are alike, and so are rows with the same room. The loop is over pairs of these; the indices
    are dealt out afterwards, all at once.

    Args:
        lengths: tokens of each sequence, at least 1.
        packing_length: most tokens of a row.
        multiple: what each sequence will be padded to; the padding counts.

    Returns:
        Rows in the order of their first sequences, so that without shuffling data keeps its order as far as it can.

    Raises:
        UserError: see `check_lengths`.
    """
    sizes = check_lengths(lengths, packing_length, multiple)
    if not len(sizes):
        return Rows(np.empty(0, np.int64), np.zeros(1, np.int64))
    by_size = np.argsort(-sizes, kind="stable")  # ties stay in order of index
    distinct, counts = np.unique(sizes, return_counts=True)

    num_rows = 0
    rooms: list[int] = []  # that open rows have, ascending, each once
    spans: dict[int, list[tuple[int, int]]] = {}  # room -> the rows that have it, as spans [first, end)
    taken: list[tuple[int, int, int]] = []  # in the order of `by_size`: rows [first, end) took so many sequences each

    def leave(first: int, end: int, room: int) -> None:
        if first < end and room >= distinct[0]:  # else nothing will come that fits
            if room not in spans:
                bisect.insort(rooms, room)
            spans.setdefault(room, []).append((first, end))

    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            place = bisect.bisect_left(rooms, size)
            if place < len(rooms):
                room = rooms[place]
                first, end = spans[room].pop()
                if not spans[room]:
                    del spans[room], rooms[place]
            else:
                room = packing_length
                first = num_rows
                num_rows = end = first - -count // (room // size)
            # The row with the least room that will do has still less after a sequence: it takes all it can at once.
            most = room // size
            full = min(end, first + count // most)
            taken.append((first, full, most))
            leave(first, full, room - most * size)
            count -= (full - first) * most
            if full < end and count:  # the last sequences of this size
                taken.append((full, full + 1, count))
                leave(full, full + 1, room - count * size)
                full, count = full + 1, 0
            leave(full, end, room)

    firsts, ends, times = np.array(taken).T
    spread = ends - firsts
    behind = np.arange(spread.sum()) - np.repeat(np.cumsum(spread) - spread, spread)
    rows = np.empty(len(sizes), np.int64)
    rows[by_size] = np.repeat(np.repeat(firsts, spread) + behind, np.repeat(times, spread))
    return _in_order(rows, num_rows)


def _in_order(rows: np.ndarray, num_rows: int) -> Rows:
    """From the row of each sequence, every row used; rows are numbered anew by their first sequence."""
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=num_rows)
    starts = np.cumsum(counts) - counts
    by_first = np.argsort(order[starts])
    counts = counts[by_first]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    behind = np.arange(len(rows)) - np.repeat(offsets[:-1], counts)
    return Rows(order[np.repeat(starts[by_first], counts) + behind], offsets)


Numbered = tuple[int, Sample]


class RowStream(Iterator[list[Sample]]):
    """Rows from a stream of samples, packed with a bounded look-ahead.

    Whenever no row is ready, the buffer is filled up and packed; the fuller half of the rows is ready then, and the row
    with the oldest sample of the buffer, so that none waits for ever. All other samples stay. What comes depends on
    the samples alone. At the end of the stream everything is packed.

    Attributes:
        waiting: the buffer, oldest first.
        ready: rows that are packed, next first.

    Args:
        samples: each with a number, by which `waiting` and `ready` of a stopped stream are found again.
        packing_length: most tokens of a row.
        buffer_size: most samples that wait to be packed.
        multiple: as for `pack`.
        waiting: of the stream that this one continues; its `samples` are then those that the other had not read.
        ready: of the stream that this one continues.
    """

    def __init__(
        self,
        samples: Iterable[Numbered],
        packing_length: int,
        buffer_size: int = 1000,
        *,
        multiple: int = 1,
        waiting: Iterable[Numbered] = (),
        ready: Iterable[list[Numbered]] = (),
    ):
        self.packing_length, self.buffer_size, self.multiple = packing_length, buffer_size, multiple
        self.waiting, self.ready = list(waiting), deque(ready)
        self._samples = iter(samples)

    def __next__(self) -> list[Sample]:
        if not self.ready:
            self._pack()
        if not self.ready:
            raise StopIteration
        return [sample for _, sample in self.ready.popleft()]

    def _pack(self) -> None:
        wanted = self.buffer_size - len(self.waiting)
        fresh = list(itertools.islice(self._samples, wanted))
        self.waiting += fresh
        lengths = np.array([len(sample) for _, sample in self.waiting], np.int64)
        rows = pack(lengths, self.packing_length, multiple=self.multiple)
        goes = np.ones(len(rows), bool)
        if len(fresh) == wanted:
            fill = np.add.reduceat(padded(lengths, self.multiple)[rows.order], rows.offsets[:-1])
            goes[np.argsort(-fill, kind="stable")[(len(rows) + 1) // 2 :]] = False
            goes[0] = True  # rows come in the order of their first samples
        self.ready.extend([self.waiting[i] for i in rows[row]] for row in np.flatnonzero(goes).tolist())
        staying = np.sort(
            np.concatenate([rows[row] for row in np.flatnonzero(~goes).tolist()] or [np.empty(0, np.int64)])
        )
        self.waiting = [self.waiting[i] for i in staying.tolist()]
