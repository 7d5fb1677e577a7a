"""Exchange results between the ranks of a mesh: gather parts of rows, and broadcast results of a stage."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from swiftlite.model.context_parallel import unshard_sequence
from swiftlite.runtime.mesh import Mesh


def all_gather_rows(tensor_BS: torch.Tensor, mesh: Mesh, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """Gather whole rows on each context-parallel rank from the parts of all context-parallel ranks.

    Args:
        cu_seqlens: starts of the sequences if the row is packed.
    """
    if mesh.cp.size() == 1:
        return tensor_BS
    parts = [torch.empty_like(tensor_BS) for _ in range(mesh.cp.size())]
    dist.all_gather(parts, tensor_BS.contiguous(), group=mesh.cp)
    return unshard_sequence(parts, -1, cu_seqlens)


def broadcast_from_last_stage(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Broadcast a tensor from the last pipeline stage to all stages, in place."""
    if mesh.pp.size() > 1:
        dist.broadcast(tensor, group=mesh.pp, group_src=mesh.pp.size() - 1)
    return tensor


def broadcast_from_first_stage(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Broadcast a tensor from the first pipeline stage to all stages, in place."""
    if mesh.pp.size() > 1:
        dist.broadcast(tensor, group=mesh.pp, group_src=0)
    return tensor


def all_reduce_sum(
    parts: Sequence[torch.Tensor], shape: tuple[int, ...], mesh: Mesh, num_maxima: int = 0
) -> torch.Tensor:
    """Sum the statistics of the micro-batches of all ranks; return the sum on the CPU of every rank.

    Args:
        parts: statistics of this rank's micro-batches on the last pipeline stage; empty on other stages.
        shape: shape of one micro-batch's statistics.
        num_maxima: number of the last entries along the first axis whose maximum is returned instead of the sum.
    """
    sums = torch.zeros(shape, dtype=torch.float64, device=mesh.device.torch_device)
    maxima = torch.full_like(sums[len(sums) - num_maxima :], -torch.inf)
    for part in parts:
        sums += part
        maxima = maxima.maximum(part[len(part) - num_maxima :])
    dist.all_reduce(sums, group=mesh.dp_cp)
    if num_maxima:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=mesh.dp_cp)
        sums[-num_maxima:] = maxima
    return broadcast_from_last_stage(sums, mesh).cpu()


def broadcast_from_mesh(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Broadcast a tensor from the ranks of a mesh to all ranks of the job, in place. Collective over the job."""
    if len(mesh.ranks) < dist.get_world_size():
        dist.broadcast(tensor, src=mesh.ranks[0])
    return tensor


def all_reduce_max(value: int, mesh: Mesh, group: dist.ProcessGroup | None = None) -> int:
    """Return the maximum of `value` over the ranks of the group (None: over all ranks of the job). With
    more than one rank, the host waits for the device."""
    if dist.get_world_size(group) == 1:
        return value
    number = torch.tensor(value, device=mesh.device.torch_device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    return int(number)
