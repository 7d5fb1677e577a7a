"""Test joins against orders that are written out, and with random shapes and ranks."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from swiftlite.bridge.join import (
    COPY,
    GATE_UP,
    ZEROS,
    GatedQkv,
    Interleave,
    InterleaveBlocks,
    Join,
    PadEnd,
    Piece,
    SourceRange,
    SwapHalves,
    clip,
    covers,
)
from tests.messages import naming


def lay_out(join: Join, sources: list[str], total: int, tp_size: int = 1) -> str:
    """Return the whole Megatron parameter as a string, with one letter per number and `0` for padding."""
    source_ranges = join.source_ranges([len(source) for source in sources], total, tp_size)
    return "".join(
        "0" * length if source == ZEROS else sources[source][start : start + length]
        for source, start, length in source_ranges
    )


@pytest.mark.parametrize(
    ("join", "sources", "tp_size", "expected"),
    [
        (COPY, ["abcd"], 2, "abcd"),
        (Interleave(1), ["ab", "CD"], 1, "abCD"),
        # Two query groups with two query heads each, one number per head: [q q k v] per group.
        (Interleave(2), ["abcd", "KL", "VW"], 1, "abKVcdLW"),
        (GATE_UP, ["abcd", "ABCD"], 1, "abcdABCD"),
        (GATE_UP, ["abcd", "ABCD"], 2, "abABcdCD"),
        # Two groups with one query, one key and two values each: [q k v v] per group.
        (InterleaveBlocks(2, ((2, 2, 4),)), ["abKLvwxy"], 1, "aKvwbLxy"),
        (InterleaveBlocks(2, ((2, 2), (4,))), ["abKL", "vwxy"], 1, "aKvwbLxy"),
        (InterleaveBlocks(None, ((4, 4),)), ["abKLvwxy"], 2, "abvwKLxy"),
        # Two query groups with two query heads each: each query comes before its gate, and goes before all gates.
        (GatedQkv(2, 1), ["aAbBcCdD", "KL", "VW"], 1, "abABKVcdCDLW"),
        (SwapHalves(axis=0), ["hiddenembedd"], 1, "embeddhidden"),
        (PadEnd(), ["abc"], 2, "abc0"),
        (PadEnd(), ["abcd"], 2, "abcd"),
    ],
)
def test_order_by_hand(join, sources, tp_size, expected):
    assert lay_out(join, sources, len(expected), tp_size) == expected


def test_clip_cuts_segments_at_the_borders_of_a_rank():
    source_ranges = [SourceRange(0, 10, 4), SourceRange(1, 0, 2), SourceRange(ZEROS, 0, 2)]
    assert clip(source_ranges, 3, 7) == [Piece(0, 13, 1, 0), Piece(1, 0, 2, 1), Piece(ZEROS, 0, 1, 3)]


@pytest.mark.parametrize(
    "source_ranges",
    [
        [SourceRange(0, 0, 4)],  # the second tensor is not used
        [SourceRange(0, 0, 4), SourceRange(1, 0, 1), SourceRange(1, 0, 1)],  # one number twice, one never
        [SourceRange(0, 0, 4), SourceRange(1, 0, 2), SourceRange(ZEROS, 0, 1)],  # longer than the parameter
        [SourceRange(0, 0, 3), SourceRange(1, 0, 3)],  # beyond the end of the second tensor
    ],
)
def test_covers_notices_numbers_lost_or_used_twice(source_ranges):
    assert not covers(source_ranges, lengths=[4, 2], total=6)


def test_parts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=naming("[4] 3")):
        Interleave(3).source_ranges([4], 4, 1)
    with pytest.raises(ValueError, match=naming("3")):
        SwapHalves(axis=0).source_ranges([3], 3, 1)
    with pytest.raises(ValueError, match=naming("((3, 3),) 2")):
        InterleaveBlocks(2, ((3, 3),)).source_ranges([6], 6, 1)
    with pytest.raises(ValueError, match=naming("[6] ((2, 2),)")):
        InterleaveBlocks(2, ((2, 2),)).source_ranges([6], 6, 1)
    with pytest.raises(ValueError, match=naming("[7, 2, 2] 2")):
        GatedQkv(2, 1).source_ranges([7, 2, 2], 11, 1)


@st.composite
def joins(draw) -> tuple[Join, list[int], int, int]:
    """Draw a join, the lengths of its HF tensors, the parameter's length, and the number of ranks that split it."""
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


@given(joins())
def test_every_number_reaches_exactly_one_place_on_one_rank(case):
    join, lengths, total, tp_size = case
    source_ranges = join.source_ranges(lengths, total, tp_size)
    assert covers(source_ranges, lengths, total)
    written = [[0] * length for length in lengths]
    share = total // tp_size
    for rank in range(tp_size):
        filled = [0] * share
        for source, start, length, local_start in clip(source_ranges, rank * share, (rank + 1) * share):
            for i in range(length):
                filled[local_start + i] += 1
                if source != ZEROS:
                    written[source][start + i] += 1
        assert filled == [1] * share
    assert all(count == 1 for counts in written for count in counts)
