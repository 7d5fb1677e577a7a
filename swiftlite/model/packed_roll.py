"""Shift a packed row within each of its sequences if a rank holds only its context-parallel part of the row.

If the whole row is available, shift it before splitting, as `data/batch.py` does; the result is the same. This module
is for frameworks that split the row before tokens are shifted. megatron-core's `roll_tensor` iterates over the
sequences in Python and sends two messages for each.

Shapes: T tokens of this rank's part, N non-empty sequences.
"""

import torch
import torch.distributed as dist


def roll_packed(
    tensor: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    shift: int = -1,
    fill: float,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return, for each token, the value `-shift` tokens later in its sequence; `fill` past the end of the sequence.

    With context parallelism, neighboring ranks exchange boundary tokens of all sequences in one message per token of
    `shift`; collective over the group.

    Args:
        tensor: ids, labels or weights [..., T]; stack several to exchange them together. Without context parallelism T
            is the whole row. With context parallelism, rank r holds chunks r and 2 * cp - 1 - r of the 2 * cp equal
            chunks of each sequence, in order (zigzag layout).
        cu_seqlens: int [num_sequences + 1], global: the start of each padded sequence in the whole row, and the
            length of the whole row. The same on every rank.
        shift: negative; moves later values to earlier positions.
        cp_group: the context-parallel ranks; None: this rank has the whole row.

    Raises:
        ValueError: `cu_seqlens` does not match the row, or the length of a sequence is not divisible by 2 * cp.
    """
    size, rank = 1, 0
    if cp_group is not None:
        size, rank = cp_group.size(), cp_group.rank()
    lengths = cu_seqlens.diff()
    _check(tensor, cu_seqlens, lengths, shift, size)
    first_N = (cu_seqlens[:-1] // size)[lengths > 0].to(tensor.device, torch.int64)
    end_N = (cu_seqlens[1:] // size)[lengths > 0].to(tensor.device, torch.int64)
    second_N = (first_N + end_N) // 2  # start of the later chunk; unused for a whole row
    for _ in range(-shift):
        # Correct except for the last token of each chunk, whose successor is on another rank or missing. On the last
        # rank, the two chunks are adjacent.
        rolled = tensor.roll(-1, dims=-1)
        rolled[..., end_N - 1] = fill
        if cp_group is not None and size > 1:
            before, behind = _exchange(tensor[..., first_N], tensor[..., second_N], cp_group)
            if rank > 0:
                rolled[..., end_N - 1] = before
            if rank < size - 1:
                rolled[..., second_N - 1] = behind
        tensor = rolled
    return tensor


def _check(tensor: torch.Tensor, cu_seqlens: torch.Tensor, lengths: torch.Tensor, shift: int, size: int) -> None:
    if shift >= 0:
        raise ValueError(f"shift {shift}: the packed roll brings later tokens forward, by -1 or less")
    num_tokens = tensor.size(-1) * size
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != num_tokens or bool((lengths < 0).any()):
        raise ValueError(
            f"cu_seqlens runs from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}, but {size} context-parallel ranks "
            f"hold {num_tokens} tokens; it rises from 0 to the padded tokens of the whole row, before it is cut"
        )
    if size > 1 and bool((lengths % (2 * size)).any()):
        odd = int(lengths[lengths % (2 * size) != 0][0])
        raise ValueError(f"a sequence of {odd} tokens does not divide by 2 * context_parallel_size = {2 * size}")


def _exchange(first: torch.Tensor, second: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that follow this rank's chunks: the first tokens [..., N] of the next chunks of all sequences.

    The first result is for this rank's later chunks, and is received from the previous rank. The second result is for
    the earlier chunks, and is received from the next rank. The first rank has no previous rank, and the last rank has
    no next rank. The tokens that would come from a missing rank are undefined.

    Args:
        first: first tokens of this rank's earlier chunks.
        second: first tokens of this rank's later chunks.
    """
    received, operations = (torch.empty_like(first), torch.empty_like(second)), []
    for neighbor, sent, target in zip((group.rank() - 1, group.rank() + 1), (first, second), received, strict=True):
        if 0 <= neighbor < group.size():
            peer = dist.get_global_rank(group, neighbor)
            operations.append(dist.P2POp(dist.isend, sent.contiguous(), peer, group))
            operations.append(dist.P2POp(dist.irecv, target, peer, group))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received
