"""Shift a packed row inside each of its sequences, where a rank holds only its context-parallel part of the row.

Where the whole row is at hand, shift it before it is cut: `data/batch.py` does, and the result is the same. This is for
frameworks that hand out parts. megatron-core's `roll_tensor` walks over the sequences in Python and sends two messages
for each.

Shapes: T the tokens of this rank's part, N sequences that are not empty.
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
    """What stands `-shift` tokens later in the same sequence; `fill` where the sequence has ended.

    With context parallelism ring neighbours tell each other their boundary tokens in one exchange for all sequences
    (one for each token of `shift`), in which all ranks of the group take part.

    Args:
        tensor: [..., T], ids, labels or weights; several in one exchange when stacked. Without context parallelism T is
            the whole row. With it, the zigzag: of each sequence, in order, chunks r and 2 * cp - 1 - r of 2 * cp equal
            ones, r being this rank.
        cu_seqlens: int [num_sequences + 1], global: where each sequence starts in the whole row, before it was cut,
            its padding counted, and the length of the whole row. The same on every rank.
        shift: -1 or less; what is later comes earlier.
        cp_group: unset: the row is whole.

    Raises:
        ValueError: `cu_seqlens` is not of this row, or a sequence does not divide by 2 * cp.
    """
    size, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    lengths = cu_seqlens.diff()
    _check(tensor, cu_seqlens, lengths, shift, size)
    first_N = (cu_seqlens[:-1] // size)[lengths > 0].to(tensor.device, torch.int64)
    end_N = (cu_seqlens[1:] // size)[lengths > 0].to(tensor.device, torch.int64)
    second_N = (first_N + end_N) // 2  # where the later chunk begins; of no use in a whole row
    for _ in range(-shift):
        # Right but for the last token of each chunk: its successor is another rank's, or there is none. The two chunks
        # of the last rank are neighbours.
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
    """The first tokens [..., N] of the chunks that follow this rank's: of the later ones, which the rank before holds,
    and of the earlier ones, which the rank behind holds. At the ends of the group what is not there is left undefined.

    Args:
        first: first tokens of this rank's earlier chunks.
        second: first tokens of its later chunks.
    """
    received, operations = (torch.empty_like(first), torch.empty_like(second)), []
    for neighbour, sent, target in zip((group.rank() - 1, group.rank() + 1), (first, second), received, strict=True):
        if 0 <= neighbour < group.size():
            peer = dist.get_global_rank(group, neighbour)
            operations.append(dist.P2POp(dist.isend, sent.contiguous(), peer, group))
            operations.append(dist.P2POp(dist.irecv, target, peer, group))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received
