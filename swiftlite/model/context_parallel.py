"""Context parallelism: split a row of tokens over ranks, and gather keys and values.

The split is Megatron's zigzag: each sequence is cut into 2 * cp chunks and rank r holds the chunks r and 2 * cp - 1 -
r, so that every rank has the same amount of causal attention. A dense row is one sequence. A packed row is split
sequence by sequence, and a rank's part keeps their order. For example, a packed row of 12 tokens with sequences of 8
and 4 on 2 ranks:

    rank 0    0 1 6 7    8 11
    rank 1    2 3 4 5    9 10

The functions above `_GatherSequence` only compute with lengths and do not communicate.

Shapes: S tokens of a whole row.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from swiftlite.runtime.device import on_device


class Segment(NamedTuple):
    """Consecutive queries of a rank, and the keys that any of these queries sees.

    The keys are a prefix of their sequence, or the end of this prefix if queries see a window. The last query sees the
    last key.
    """

    num_queries: int
    key_start: int
    key_end: int


def sequence_lengths(num_tokens: int, cu_seqlens: torch.Tensor | None = None) -> tuple[int, ...]:
    """Return the lengths of the sequences of a whole row; without `cu_seqlens` the row is one sequence."""
    if cu_seqlens is None:
        return (num_tokens,)
    return tuple(cu_seqlens.diff().tolist())


def describe_packed(cu_seqlens: torch.Tensor | None) -> PackedSeqParams | None:
    """Return megatron-core's descriptor of a packed row; None for padded rows.

    Args:
        cu_seqlens: starts of the sequences including padding, on the host, where each layer reads them.
    """
    if cu_seqlens is None:
        return None
    longest = int(cu_seqlens.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def padded_cu_seqlens(packed: PackedSeqParams | None) -> torch.Tensor | None:
    """Return the starts of the sequences of a packed row, including padding if the descriptor has it; else None."""
    if packed is None:
        return None
    if packed.cu_seqlens_q_padded is None:
        return packed.cu_seqlens_q
    return packed.cu_seqlens_q_padded


def shared_row(
    num_tokens: int, packed: PackedSeqParams | None, group: dist.ProcessGroup
) -> tuple[tuple[int, ...], dist.ProcessGroup]:
    """Return the lengths of the sequences of a whole row, and the ranks that share it.

    Args:
        num_tokens: number of tokens of the row on this rank.
        group: the ranks that share rows; the descriptor of a packed row can specify another group.
    """
    if packed is not None:
        group = packed.cp_group or group
    return sequence_lengths(num_tokens * group.size(), padded_cu_seqlens(packed)), group


def _runs(lengths: Sequence[int], rank: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of consecutive tokens that rank `rank` of `size` holds, in order. A run may be empty.

    Each run is (start of its sequence, start of the run, end of the run) in the whole row. In the example of the module
    docstring, rank 0 has (0, 0, 2), (0, 6, 8), (8, 8, 9) and (8, 11, 12).

    Raises:
        ValueError: a length is not a multiple of 2 * size.
    """
    start = 0
    for length in lengths:
        chunk, chunks = length, (0,)
        if size > 1:
            chunk, chunks = _chunk_length(length, size), (rank, 2 * size - 1 - rank)
        for index in chunks:
            yield start, start + index * chunk, start + (index + 1) * chunk
        start += length


def _chunk_length(length: int, size: int) -> int:
    if length % (2 * size):
        raise ValueError(f"a sequence of {length} tokens does not divide by 2 * context_parallel_size = {2 * size}")
    return length // (2 * size)


@lru_cache(maxsize=64)  # every layer calls it for the row of the micro-batch
def zigzag_positions(lengths: tuple[int, ...], rank: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the positions in the whole row of the tokens on rank `rank` of `size`: int64 [S / size].

    Raises:
        ValueError: a length is not a multiple of 2 * size.
    """
    positions = [torch.arange(start, end) for _, start, end in _runs(lengths, rank, size)]
    return on_device(torch.cat(positions), device)


@lru_cache(maxsize=16)
def _gathered_order(lengths: tuple[int, ...], size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two permutations of the tokens of a row that is gathered by concatenating the parts of all ranks.

    The first has the position in the row of each gathered token; the second is its inverse. In the example of the
    module docstring, the positions are 0 1 6 7 8 11 2 3 4 5 9 10.
    """
    order = torch.cat([zigzag_positions(lengths, rank, size, device) for rank in range(size)])
    return order, order.argsort()


@lru_cache(maxsize=16)
def causal_segments(lengths: tuple[int, ...], rank: int, size: int, window: int | None = None) -> tuple[Segment, ...]:
    """Return the non-empty runs of queries of rank `rank`, in order, with their keys in the whole row.

    In the example of the module docstring, the second segment of rank 0 has queries 6 and 7: Segment(2, 0, 8). With a
    window of 4 tokens it is Segment(2, 3, 8).

    Args:
        window: number of keys that a query sees; None: all keys of its sequence up to its position.
    """
    runs = [run for run in _runs(lengths, rank, size) if run[1] < run[2]]
    return tuple(Segment(end - start, first_in_window(first, start, window), end) for first, start, end in runs)


def parts_of(segments: Sequence[Segment], runs: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """Return the segments of some of the queries, with their keys.

    Args:
        segments: segments of all queries, whose keys are prefixes of sequences.
        runs: (start, end) of consecutive queries of this rank, ascending.
    """
    parts, first = [], 0
    for segment in segments:
        last = first + segment.num_queries
        cut = ((max(start, first), min(end, last)) for start, end in runs)
        parts += [
            Segment(end - start, segment.key_start, segment.key_end - last + end) for start, end in cut if start < end
        ]
        first = last
    return tuple(parts)


def first_in_window(first: int, query: int, window: int | None) -> int:
    """Return the position of the first key that a query sees.

    Args:
        first: first position of the query's sequence.
        query: position of the query.
        window: number of keys that the query sees at most; None: no limit.
    """
    if window is None:
        return first
    return max(first, query - window + 1)


def seen_by(segments: Sequence[Segment], row: torch.Tensor) -> list[torch.Tensor]:
    """Return the part of a whole row of keys or values [S, ...] that the queries of each segment see.

    If the parts are disjoint and cover the row, `torch.split` is used instead of slices, because the gradient of each
    slice would be a tensor of the size of the whole row.
    """
    sizes = [segment.key_end - segment.key_start for segment in segments]
    ends = list(accumulate(sizes))
    if [segment.key_end for segment in segments] == ends and ends[-1:] == [row.size(0)]:
        return list(row.split(sizes))
    return [row[segment.key_start : segment.key_end] for segment in segments]


def shard_sequence(
    tensor: torch.Tensor, dim: int, rank: int, size: int, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the part of whole rows on rank `rank` of `size`.

    Args:
        tensor: whole rows, S tokens along `dim`.
        cu_seqlens: for a packed row, int [num_sequences + 1]: the start of each padded sequence, and finally S.

    Raises:
        ValueError: the length of a sequence is not a multiple of 2 * size, or the sequences do not cover the row.
    """
    if size == 1:
        return tensor
    lengths = sequence_lengths(tensor.size(dim), cu_seqlens)
    if sum(lengths) != tensor.size(dim):
        raise ValueError(f"cu_seqlens ends at {sum(lengths)}, but the row has {tensor.size(dim)} tokens")
    return tensor.index_select(dim, zigzag_positions(lengths, rank, size, tensor.device))


def unshard_sequence(shards: Sequence[torch.Tensor], dim: int, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """Invert `shard_sequence`: return the whole row from the parts of all ranks, in order of rank."""
    gathered = torch.cat(list(shards), dim)
    lengths = sequence_lengths(gathered.size(dim), cu_seqlens)
    return gathered.index_select(dim, _gathered_order(lengths, len(shards), gathered.device)[1])


class _GatherSequence(torch.autograd.Function):
    """Gathers all ranks' parts along axis 0 into a row in token order.

    In the backward pass, the row's gradient is summed over ranks and each rank keeps its part of the sum.
    """

    @staticmethod
    def forward(ctx, local: torch.Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.lengths = group, lengths
        local = local.contiguous()
        row = local.new_empty(local.size(0) * group.size(), *local.shape[1:])
        if len(lengths) == 1:
            return _gather_chunks(row, local, group)
        _, inverse = _gathered_order(lengths, group.size(), local.device)
        dist.all_gather_into_tensor(row, local, group=group)
        return row.index_select(0, inverse)

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor):
        (grad,) = grad_outputs
        local = grad.new_empty(grad.size(0) // ctx.group.size(), *grad.shape[1:])
        if len(ctx.lengths) == 1:
            return _scatter_chunks(local, grad, ctx.group), None, None
        order, _ = _gathered_order(ctx.lengths, ctx.group.size(), grad.device)
        dist.reduce_scatter_tensor(local, grad.index_select(0, order), group=ctx.group)
        return local, None, None


def _gather_chunks(row: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Fill `row`, which is one sequence, from the chunks of all ranks.

    The first chunks of all ranks are gathered in place. The second chunks are in reverse order of rank, so these chunks
    are gathered into a buffer and copied.
    """
    first, second = local.split(_chunk_length(row.size(0), group.size()))
    early, late = row.chunk(2)
    dist.all_gather_into_tensor(early, first, group=group)
    from_the_end = torch.empty_like(late)
    dist.all_gather_into_tensor(from_the_end, second, group=group)
    torch.cat(from_the_end.chunk(group.size())[::-1], out=late)
    return row


def _scatter_chunks(local: torch.Tensor, grad: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum the gradients of the row over ranks, write this rank's two chunks of the sum into `local`, and return it."""
    (first, second), (early, late) = local.chunk(2), grad.contiguous().chunk(2)
    dist.reduce_scatter_tensor(first, early, group=group)
    dist.reduce_scatter_tensor(second, torch.cat(late.chunk(group.size())[::-1]), group=group)
    return local


def gather_sequence(local: torch.Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the whole row [S, ...] on every rank from each rank's part [S / size, ...], differentiable.

    Args:
        lengths: lengths of the sequences of the whole row.
    """
    return _GatherSequence.apply(local, lengths, group)  # type: ignore[return-value]
