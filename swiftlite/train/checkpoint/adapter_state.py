"""Save adapters in a checkpoint independently of the layout, as whole tensors with names of the whole model."""

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import nn

from swiftlite.base.lora import is_adapter
from swiftlite.bridge.adapters.rows import A
from swiftlite.bridge.placement import global_name
from swiftlite.model.layers.lora import Adapter
from swiftlite.runtime.mesh import Mesh

Sharded = ShardedTensor | ShardedTensorFactory


def with_adapters(state: dict[str, Any], chunk: nn.Module, mesh: Mesh) -> dict[str, Any]:
    """Return the sharded state of a chunk with the place of each adapter tensor in the whole model.

    megatron-core's layers treat all tensors except their weight and bias as replicated on all ranks.
    """
    placed = {name: value for name, value in state.items() if not is_adapter(name)}
    for name, module in chunk.named_modules():
        if isinstance(module, Adapter):
            placed |= _tensors(name, module, chunk, mesh)
    return placed


def _tensors(name: str, adapter: Adapter, chunk: nn.Module, mesh: Mesh) -> dict[str, Sharded]:
    replicas = mesh.groups.expt_dp if adapter.is_expert else mesh.dp_cp
    rank, size = adapter.group.rank(), adapter.group.size()
    tensors: dict[str, Sharded] = {}
    for local_name, parameter in adapter.named_parameters(name):
        # Of a column-parallel layer, B is split by its rows and A is whole; of a row-parallel layer, A by its columns.
        is_split = adapter.is_column != (f".{A}" in local_name)  # magnitudes are split in the same way as B
        offsets = []
        # A whole tensor has a copy on each rank, of which megatron-core writes the one whose ids are all 0.
        replica = rank
        if is_split:
            axis = 0 if adapter.is_column else 1
            offsets = [(axis, rank, size)]
            replica = 0
        whole = ShardedTensor.from_rank_offsets(
            global_name(local_name, chunk), parameter, *offsets, replica_id=(0, replica, replicas.rank())
        )
        tensors[local_name] = whole
        if is_split and adapter.has_halves:
            # Rows of the rank's part of the gate, then of its part of up; saved as all rows of the gate, then of up.
            tensors[local_name] = apply_swiglu_sharded_factory(whole, ())
    return tensors
