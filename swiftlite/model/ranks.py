"""What the ranks of a layout tell each other around the pipeline: parts of rows put together, results of its end."""

from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from swiftlite.model.context_parallel import unshard_sequence


def whole_rows(tensor_BS: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of which context-parallel ranks hold parts, put together again on each.

    Args:
        cu_seqlens: of the whole row if it is a packed one.
    """
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return tensor_BS
    parts = [torch.empty_like(tensor_BS) for _ in range(size)]
    dist.all_gather(parts, tensor_BS.contiguous(), group=parallel_state.get_context_parallel_group())
    return unshard_sequence(parts, -1, cu_seqlens)


def from_last_stage(tensor: torch.Tensor) -> torch.Tensor:
    """What the last pipeline stage has in this tensor, on every stage; in place."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        group = cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())
        dist.broadcast(tensor, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return tensor


def largest(value: int, device: torch.device, group=None) -> int:
    """The largest value that any rank of the group (unset: of all) has."""
    number = torch.tensor(value, device=device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    return int(number)
