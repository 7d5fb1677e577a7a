"""Test packing: every sequence occurs once, no row is too long, and the number of rows is nearly minimal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftlite.base.errors import UserError
from swiftlite.data.packing.packing import PackedRows, RowStream, StreamSample, pack, padded
from tests.messages import mentions


def lognormal(number: int, mean: float = 500, longest: int = 4096, seed: int = 0) -> np.ndarray:
    drawn = np.random.RandomState(seed).lognormal(np.log(mean) - 0.5, 1.0, number)
    return np.clip(drawn, 1, longest).astype(np.int64)


def as_lists(rows: PackedRows) -> list[list[int]]:
    return [rows[row].tolist() for row in range(len(rows))]


def one_by_one(lengths: list[int], packing_length: int) -> list[int]:
    """Pack by best-fit decreasing in the simplest way, and return the remaining room of each row, sorted."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [room for room in rooms if room >= length]
        if fits:
            rooms.remove(min(fits))
        rooms.append((min(fits) if fits else packing_length) - length)
    return sorted(rooms)


@given(st.lists(st.integers(1, 40), max_size=120), st.integers(40, 60), st.sampled_from([1, 2, 4, 8]))
def test_rows_hold_every_sequence_once_and_are_those_of_the_textbook(lengths, packing_length, multiple):
    rows = pack(lengths, packing_length, multiple=multiple)
    sizes = padded(np.array(lengths, np.int64), multiple)
    assert sorted(rows.order.tolist()) == list(range(len(lengths)))
    rooms = [packing_length - int(sizes[row].sum()) for row in as_lists(rows)]
    assert sorted(rooms) == one_by_one(sizes.tolist(), packing_length)
    assert all(row == sorted(row) and row for row in as_lists(rows))
    firsts = [row[0] for row in as_lists(rows)]
    assert firsts == sorted(firsts)


def test_rows_by_hand():
    assert as_lists(pack([5, 3, 8, 2, 2, 10, 10], 10)) == [[0, 1, 3], [2, 4], [5], [6]]
    assert as_lists(pack([1, 1, 1], 8, multiple=4)) == [[0, 1], [2]]
    assert as_lists(pack([], 10)) == []


def test_ordinary_lengths_fill_99_percent():
    for mean in (300, 500, 1500):
        lengths = lognormal(20_000, mean)
        assert lengths.sum() / (len(pack(lengths, 4096)) * 4096) > 0.99


def test_the_rows_never_change_between_versions():
    """A run that resumes after an update must continue with the same rows.

    The expected rows are stored in this test.
    """
    rows = pack([100, 36, 64, 100, 100, 9, 62, 20, 21, 36, 28, 100], 100)
    assert as_lists(rows) == [[0], [1, 2], [3], [4], [5, 7, 8, 10], [6, 9], [11]]


@pytest.mark.parametrize(
    ("lengths", "multiple", "message"),
    [
        ([5, 17, 30], 1, "1 17 --packing_length 16 30 --max_length"),
        ([5, 13], 8, "1 13 16 8 --packing_length 15 --max_length"),
        ([3, 0], 1, "1 0"),
    ],
)
def test_sequences_that_no_row_can_hold(lengths, multiple, message):
    with pytest.raises(UserError) as caught:
        pack(lengths, 15 if multiple > 1 else 16, multiple=multiple)
    assert mentions(str(caught.value), message)


# Streams


def numbered(lengths) -> list[StreamSample]:
    return [StreamSample(i, 0, length) for i, length in enumerate(lengths)]


def drain(stream: RowStream) -> list[list[int]]:
    """Return the sample numbers of each row of a stream."""
    return [[entry.row for entry in row] for row in stream]


@given(st.lists(st.integers(1, 30), max_size=80), st.integers(1, 20), st.sampled_from([1, 4]), st.integers(0, 40))
def test_a_stream_gives_every_sample_once_and_goes_on_from_anywhere(lengths, buffer_size, multiple, cut):
    samples = numbered(lengths)
    unbroken = drain(RowStream(samples, 32, buffer_size, multiple=multiple))
    assert sorted(number for row in unbroken for number in row) == list(range(len(lengths)))
    assert all(padded(np.array(lengths)[row], multiple).sum() <= 32 for row in unbroken)

    source = iter(samples)
    first = RowStream(source, 32, buffer_size, multiple=multiple)
    rows = [row for _, row in zip(range(cut), first, strict=False)]
    assert len(first.waiting) <= buffer_size
    second = RowStream(source, 32, buffer_size, multiple=multiple, waiting=first.waiting, ready=first.ready)
    assert [[entry.row for entry in row] for row in rows] + drain(second) == unbroken


def test_a_stream_looks_no_further_ahead_than_its_buffer():
    source = iter(numbered([7] * 100))
    stream = RowStream(source, 10, buffer_size=8)
    next(stream)
    assert len(list(source)) == 92


def test_no_sample_waits_for_ever():
    """A row that is less full than all others is also returned, because it contains the oldest sample."""
    lengths = [51] + [50] * 400  # 50 + 50 fills a row, 51 never shares one
    rows = drain(RowStream(numbered(lengths), 100, buffer_size=20))
    assert rows[0] == [0]
    later = [50] * 10 + [51] + [50] * 400
    rows = drain(RowStream(numbered(later), 100, buffer_size=20))
    assert rows.index([10]) < 20


def test_a_stream_fills_its_rows():
    lengths = lognormal(20_000)
    count = sum(1 for _ in RowStream(numbered(lengths), 4096, buffer_size=1000))
    assert lengths.sum() / (count * 4096) > 0.99
