"""Test `roll_packed` on 1, 2 and 4 context-parallel ranks by comparing ids."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from swiftlite.data.batch import shift_left
from swiftlite.model.context_parallel import shard_sequence
from swiftlite.model.packed_roll import roll_packed
from tests.messages import naming
from tests.parallel.launch import launch

pytestmark = pytest.mark.gloo

ROWS = 200
"""Number of random rows for each number of ranks."""


def reference(ids: list[int], lengths: list[int], shift: int, fill: int) -> list[int]:
    """Shift the ids of each sequence in plain Python."""
    rolled = []
    for length in lengths:
        sequence, ids = ids[:length], ids[length:]
        later = sequence[-shift:]
        rolled += later + [fill] * (length - len(later))
    assert not ids
    return rolled


def random_lengths(random: np.random.RandomState, size: int) -> list[int]:
    """Return the lengths of 1 to 12 sequences, some of them empty or with a single chunk.

    Without context parallelism, lengths are arbitrary.
    """
    multiple = 2 * size if size > 1 else 1
    return [int(random.randint(0, 6) ** 2) * multiple for _ in range(random.randint(1, 13))]


def cumulate(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def roll_many() -> dict[int, int]:
    """Compare many random rows in this process; return the number of compared rows by context-parallel size."""
    dist.init_process_group("gloo")
    me, compared = dist.get_rank(), {}
    for size in (1, 2, 4):
        groups = [dist.new_group(list(range(start, start + size))) for start in range(0, 4, size)]
        group = groups[me // size]
        assert isinstance(group, dist.ProcessGroup)
        random = np.random.RandomState(size)
        for number in range(ROWS):
            lengths = random_lengths(random, size)
            shift, fill = -int(random.randint(1, 4)), int(random.choice([0, -100]))
            cu_seqlens, ids = cumulate(lengths), torch.from_numpy(random.randint(1, 10**9, sum(lengths)))[None]
            part = shard_sequence(ids, -1, group.rank(), size, cu_seqlens)
            ours = roll_packed(part, cu_seqlens, shift=shift, fill=fill, cp_group=group)
            assert ours.dtype == ids.dtype
            whole = torch.tensor([reference(ids[0].tolist(), lengths, shift, fill)], dtype=torch.int64)
            expected = shard_sequence(whole, -1, group.rank(), size, cu_seqlens)
            assert torch.equal(ours, expected), (size, number, lengths, shift)
            shifted = ids
            for _ in range(-shift if sum(lengths) else 0):  # shift the whole row, then cut it
                shifted = shift_left(shifted, fill, cu_seqlens)
            assert torch.equal(ours, shard_sequence(shifted, -1, group.rank(), size, cu_seqlens))
        compared[size] = number + 1
        check_stacked_and_dtypes(group)
    dist.destroy_process_group()
    return compared


def check_stacked_and_dtypes(group: dist.ProcessGroup) -> None:
    """Check several stacked rows in one exchange, with weights and masks as well as ids. The input must not change."""
    lengths = [8, 16, 8, 40]
    cu_seqlens = cumulate(lengths)
    rank, size = group.rank(), group.size()
    for dtype in (torch.int32, torch.float32, torch.bfloat16, torch.bool):
        row = (torch.arange(2 * 3 * 72).view(2, 3, 72) % 5).to(dtype)
        part = shard_sequence(row, -1, rank, size, cu_seqlens)
        before = part.clone()
        ours = roll_packed(part, cu_seqlens, fill=0, cp_group=group)
        expected = shift_left(row.flatten(0, 1), 0, cu_seqlens).view_as(row)
        assert torch.equal(ours, shard_sequence(expected, -1, rank, size, cu_seqlens))
        assert torch.equal(part, before)
    if size == 1:
        return
    with pytest.raises(ValueError, match=naming(f"0 72 {size} {72 * size}")):
        roll_packed(torch.zeros(1, 72), cu_seqlens, fill=0, cp_group=group)  # a whole row, not a part
    with pytest.raises(ValueError, match=naming(f"2 context_parallel_size = {2 * size}")):
        roll_packed(torch.zeros(1, 8 // size + 8), cumulate([8 * size, 2, 6]), fill=0, cp_group=group)


def test_ids_are_those_of_the_reference():
    assert launch(4, roll_many) == [{1: ROWS, 2: ROWS, 4: ROWS}] * 4


def test_what_is_not_of_this_row():
    row = torch.zeros(1, 6)
    for lengths in ([2, 3], [2, 5], [7, -1, 1]):
        with pytest.raises(ValueError, match=naming("cu_seqlens 0")):
            roll_packed(row, cumulate(lengths), fill=0)
    with pytest.raises(ValueError, match=naming("shift 1")):
        roll_packed(row, cumulate([6]), shift=1, fill=0)
