"""Test the split of rows over context-parallel ranks: against megatron-core's function, and back to the whole row."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.utils import get_batch_on_this_cp_rank

from swiftlite.model.context_parallel import causal_segments, shard_sequence, unshard_sequence
from tests.messages import naming


def cumulate(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@st.composite
def packed_rows(draw) -> tuple[int, list[int]]:
    """Draw a context-parallel size, and lengths of sequences that it divides."""
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    chunks = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    return size, [chunk * (2 * size if size > 1 else 1) for chunk in chunks]


@given(packed_rows())
def test_unshard_brings_the_row_back(row):
    size, lengths = row
    tokens = torch.arange(2 * sum(lengths)).view(2, -1)
    parts = [shard_sequence(tokens, 1, rank, size, cumulate(lengths)) for rank in range(size)]
    assert all(part.size(1) * size == sum(lengths) for part in parts)
    assert torch.equal(unshard_sequence(parts, 1, cumulate(lengths)), tokens)


@given(packed_rows())
def test_a_packed_row_is_cut_sequence_by_sequence(row):
    size, lengths = row
    tokens = torch.arange(sum(lengths))
    for rank in range(size):
        part = shard_sequence(tokens, 0, rank, size, cumulate(lengths))
        alone = [shard_sequence(sequence, 0, rank, size) for sequence in tokens.split(lengths)]
        assert torch.equal(part, torch.cat(alone))


@given(packed_rows())
def test_the_last_query_of_a_segment_sees_the_last_key(row):
    """Positions from the function that splits rows are compared with the positions that attention uses."""
    size, lengths = row
    for rank in range(size):
        part = iter(shard_sequence(torch.arange(sum(lengths)), 0, rank, size, cumulate(lengths)).tolist())
        for segment in causal_segments(tuple(lengths), rank, size):
            for position in range(segment.key_end - segment.num_queries, segment.key_end):
                assert next(part) == position
            assert segment.key_start in cumulate(lengths)
        assert list(part) == []


@pytest.mark.parametrize("size", [2, 4])
def test_a_dense_row_is_cut_as_megatron_core_does(device, monkeypatch, size):
    tokens = torch.arange(2 * 24 * 3).view(2, 24, 3)
    process_group: Any = dist.ProcessGroup  # the constructor of two numbers is not annotated upstream
    cut: Any = get_batch_on_this_cp_rank
    if "is_hybrid_cp" in inspect.signature(cut).parameters:  # since megatron-core 0.19
        cut = partial(cut, is_hybrid_cp=False)
        # It asks torch, which knows no group that has one process; the group itself answers.
        monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())
        monkeypatch.setattr(dist, "get_world_size", lambda group: group.size())
    for rank in range(size):
        batch, group = {"tokens": tokens, "cu_seqlens": None}, process_group(rank, size)
        theirs = cut(batch, cp_group=group)["tokens"]
        assert torch.equal(shard_sequence(tokens, 1, rank, size), theirs)


def test_lengths_that_cannot_be_cut():
    with pytest.raises(ValueError, match=naming("6 2 context_parallel_size = 4")):
        shard_sequence(torch.arange(10), 0, 0, 2, cumulate([4, 6]))
    with pytest.raises(ValueError, match=naming("cu_seqlens 8 10")):
        shard_sequence(torch.arange(10), 0, 0, 2, cumulate([4, 4]))
