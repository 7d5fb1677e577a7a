"""Layouts against orders written out by hand, then against random shapes and ranks."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from swiftlite.bridge.layout import (
    COPY,
    GATE_UP,
    ZEROS,
    Interleave,
    Layout,
    PadEnd,
    Piece,
    Segment,
    SwapHalves,
    clip,
    covers,
)


def lay_out(layout: Layout, sources: list[str], total: int, tp_size: int = 1) -> str:
    """One letter per number: the whole Megatron parameter as a string, `0` for padding."""
    segments = layout.segments([len(source) for source in sources], total, tp_size)
    return "".join(
        "0" * length if source == ZEROS else sources[source][start : start + length]
        for source, start, length in segments
    )


@pytest.mark.parametrize(
    ("layout", "sources", "tp_size", "expected"),
    [
        (COPY, ["abcd"], 2, "abcd"),
        (Interleave(1), ["ab", "CD"], 1, "abCD"),
        # Two query groups with two query heads each, one number per head: [q q k v] per group.
        (Interleave(2), ["abcd", "KL", "VW"], 1, "abKVcdLW"),
        (GATE_UP, ["abcd", "ABCD"], 1, "abcdABCD"),
        (GATE_UP, ["abcd", "ABCD"], 2, "abABcdCD"),
        (SwapHalves(axis=0), ["hiddenembedd"], 1, "embeddhidden"),
        (PadEnd(), ["abc"], 2, "abc0"),
        (PadEnd(), ["abcd"], 2, "abcd"),
    ],
)
def test_order_by_hand(layout, sources, tp_size, expected):
    assert lay_out(layout, sources, len(expected), tp_size) == expected


def test_clip_cuts_segments_at_the_borders_of_a_rank():
    segments = [Segment(0, 10, 4), Segment(1, 0, 2), Segment(ZEROS, 0, 2)]
    assert clip(segments, 3, 7) == [Piece(0, 13, 1, 0), Piece(1, 0, 2, 1), Piece(ZEROS, 0, 1, 3)]


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(0, 0, 4)],  # the second tensor is not used
        [Segment(0, 0, 4), Segment(1, 0, 1), Segment(1, 0, 1)],  # one number twice, one never
        [Segment(0, 0, 4), Segment(1, 0, 2), Segment(ZEROS, 0, 1)],  # longer than the parameter
        [Segment(0, 0, 3), Segment(1, 0, 3)],  # beyond the end of the second tensor
    ],
)
def test_covers_notices_numbers_lost_or_used_twice(segments):
    assert not covers(segments, lengths=[4, 2], total=6)


def test_parts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="do not divide into 3 parts"):
        Interleave(3).segments([4], 4, 1)
    with pytest.raises(ValueError, match="no halves"):
        SwapHalves(axis=0).segments([3], 3, 1)


@st.composite
def layouts(draw) -> tuple[Layout, list[int], int, int]:
    """A layout, lengths of its HF tensors, the parameter's length, and a number of ranks that share it."""
    tp_size = draw(st.sampled_from([1, 2, 4, 8]))
    units = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["interleave", "gate_up", "swap", "pad"]))
    if kind == "interleave":
        # A multiple of tp_size in all, but groups may be cut in two by the border of a rank.
        lengths = [units * tp_size * draw(st.integers(1, 5)) for _ in range(draw(st.integers(1, 4)))]
        return Interleave(units), lengths, sum(lengths), tp_size
    if kind == "gate_up":
        lengths = [tp_size * draw(st.integers(1, 9))] * 2
        return GATE_UP, lengths, sum(lengths), tp_size
    if kind == "swap":
        length = 2 * tp_size * draw(st.integers(1, 9))
        return SwapHalves(axis=0), [length], length, tp_size
    length = draw(st.integers(1, 40))
    return PadEnd(), [length], -(-length // tp_size) * tp_size, tp_size


@given(layouts())
def test_every_number_reaches_exactly_one_place_on_one_rank(case):
    layout, lengths, total, tp_size = case
    segments = layout.segments(lengths, total, tp_size)
    assert covers(segments, lengths, total)
    written = [[0] * length for length in lengths]
    share = total // tp_size
    for rank in range(tp_size):
        filled = [0] * share
        for source, start, length, local_start in clip(segments, rank * share, (rank + 1) * share):
            for i in range(length):
                filled[local_start + i] += 1
                if source != ZEROS:
                    written[source][start + i] += 1
        assert filled == [1] * share
    assert all(count == 1 for counts in written for count in counts)
