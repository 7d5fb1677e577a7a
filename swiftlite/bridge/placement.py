"""Which rank holds which part of which parameter: the only file of the bridge that knows megatron-core and processes.

A parameter says itself how it is shared (`tensor_model_parallel`, `partition_dim`), so no table of names is kept here.
Reading and writing need no collective but a barrier; only with pipeline stages are names exchanged, for the plan.
"""

import re
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerLayer
from megatron.core.utils import unwrap_model
from torch import nn

from swiftlite.bridge.plan import Shard

_WRAPPERS = re.compile(r"^(module\.)+")
_NUMBERED_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.")
# megatron-core calls the decoder layer inside an MTP layer transformer_layer up to 0.16, mtp_model_layer later.
_MTP_INNER_LAYER = re.compile(r"^(mtp\.layers\.\d+\.)mtp_model_layer\.")


def shards_of(model_chunks: Sequence[nn.Module]) -> list[Shard]:
    """Every parameter and persistent buffer of this rank, under its whole name.

    Args:
        model_chunks: the GPTModel of this pipeline stage, or one per virtual stage; DDP and Float16Module around them
            are seen through.
    """
    is_first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    shards = []
    for chunk in model_chunks:
        model = _unwrap(chunk)
        # state_dict and not named_parameters: it has the persistent buffers too, and only those.
        for local_name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):  # megatron-core's _extra_state
                continue
            name = global_name(local_name, model)
            # megatron-core sets these attributes on parameters that it shards, and on no others (layers.py:101).
            is_sharded = getattr(tensor, "tensor_model_parallel", False) and tp_size > 1
            # A later stage that computes MTP holds a second embedding; the first stage's is the one that counts.
            is_stage_copy = name.startswith("embedding.") and not model.pre_process
            shards.append(
                Shard(
                    name,
                    tensor.detach(),
                    tensor.partition_dim if is_sharded else None,  # type: ignore[attr-defined]
                    tp_rank if is_sharded else 0,
                    tp_size if is_sharded else 1,
                    writes=is_first_replica and (is_sharded or tp_rank == 0) and not is_stage_copy,
                )
            )
    # megatron-core 0.16 marks a weight as sharded only while initialising it; gradient norms count on the mark too.
    assert tp_size == 1 or any(shard.partition_dim is not None for shard in shards), (
        "no parameter is marked as tensor-parallel: build the model with perform_initialization=True"
    )
    return shards


def global_name(local_name: str, model: nn.Module) -> str:
    """The parameter's name in a model that is not split: no wrappers, layers counted from the first stage.

    The layer's own number is asked (`layer_number`, from 1, over all stages), so any pipeline layout is right.
    """
    name = _WRAPPERS.sub("", local_name)
    if match := _NUMBERED_LAYER.match(name):
        # An MTP layer is no TransformerLayer, but counts itself the same way.
        layer = cast(TransformerLayer, model.get_submodule(match.group(0).rstrip(".")))
        name = f"{match.group(1)}.layers.{layer.layer_number - 1}.{name[match.end() :]}"
    return _MTP_INNER_LAYER.sub(r"\1transformer_layer.", name)


def names_of_all_stages(shards: Sequence[Shard]) -> set[str]:
    """Parameter names over all pipeline stages; collective when there is more than one."""
    names = {shard.name for shard in shards}
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages == 1:
        return names
    gathered: list[set[str]] = [set()] * stages
    dist.all_gather_object(gathered, names, group=parallel_state.get_pipeline_model_parallel_group())
    return set().union(*gathered)


def mtp_num_layers(model_chunks: Sequence[nn.Module]) -> int:
    """MTP depth that the model was built with, the same on every stage."""
    return _unwrap(model_chunks[0]).config.mtp_num_layers or 0


def _unwrap(chunk: nn.Module) -> GPTModel:
    return cast(GPTModel, unwrap_model(chunk))


def is_first_rank() -> bool:
    """Whether this process does what must be done once."""
    return dist.get_rank() == 0


def barrier() -> None:
    """Wait for all processes."""
    if dist.get_world_size() > 1:
        dist.barrier()
