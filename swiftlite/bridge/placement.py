"""Determine which rank holds which part of a parameter; the only module of the bridge that uses megatron-core and
processes.

A parameter states how it is split (`tensor_model_parallel`, `partition_dim`), and a layer or an expert states its
number, so there is no table of names. Reading needs no collective. Writing needs only barriers if all ranks see the
same files."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerLayer
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model
from torch import nn

from swiftlite.bridge.binding import Shard
from swiftlite.bridge.tensors import Index

_WRAPPERS = re.compile(r"^(module\.)+")
_NUMBERED_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.")
_EXPERTS = re.compile(r"\.experts\.local_experts\.(\d+)\.")
# megatron-core calls the decoder layer inside an MTP layer transformer_layer up to 0.16, mtp_model_layer later.
_MTP_INNER_LAYER = re.compile(r"^(mtp\.layers\.\d+\.)mtp_model_layer\.")


Piece = tuple[str, Index, torch.Tensor]
"""A slice of an HF tensor: its key, the index of the slice, and its values."""


def shards_of(model_chunks: Sequence[nn.Module]) -> list[Shard]:
    """Return every parameter and persistent buffer of this rank, under its whole name.

    Args:
        model_chunks: the GPTModel of this pipeline stage, or one per virtual stage; DDP and Float16Module around them
            are seen through.
    """
    shards = []
    for chunk in model_chunks:
        model = _unwrap(chunk)
        # state_dict and not named_parameters: it has the persistent buffers too, and only those.
        for local_name, tensor in model.state_dict(keep_vars=True).items():
            if local_name.endswith("_extra_state"):  # megatron-core's None, Transformer Engine's state of FP8
                continue
            name = global_name(local_name, model)
            tp_rank, tp_size, is_first_replica = _sharing(local_name, model)
            # megatron-core sets these attributes on parameters that it shards, and on no others (layers.py:101).
            is_sharded = getattr(tensor, "tensor_model_parallel", False) and tp_size > 1
            # A later stage that computes MTP holds a second embedding; the first stage's is the one that counts.
            is_stage_copy = name.startswith("embedding.") and not model.pre_process
            writes = is_first_replica and (is_sharded or tp_rank == 0) and not is_stage_copy
            shard = Shard(name, tensor.detach(), writes=writes)
            if is_sharded:
                partition_dim = tensor.partition_dim  # type: ignore[attr-defined]
                shard = replace(shard, partition_dim=partition_dim, tp_rank=tp_rank, tp_size=tp_size)
            shards.append(shard)
    # megatron-core 0.16 marks a weight as sharded only while initializing it; gradient norms count on the mark too.
    tp_size = _groups(model_chunks).tp.size()
    assert tp_size == 1 or any(shard.partition_dim is not None for shard in shards), (
        "no parameter is marked as tensor-parallel: build the model with perform_initialization=True"
    )
    return shards


def _sharing(local_name: str, model: GPTModel) -> tuple[int, int, bool]:
    """Return this rank's index among the ranks that split a parameter, their number, and whether it is the first
    replica.

    Experts are split and replicated over other ranks than the rest of the model; they know their groups.
    """
    if match := _EXPERTS.search(local_name):
        experts = cast(SequentialMLP, model.get_submodule(local_name[: match.start() + len(".experts")]))
        return experts.tp_group.rank(), experts.tp_group.size(), experts.dp_group.rank() == 0
    groups = model.pg_collection
    return groups.tp.rank(), groups.tp.size(), groups.dp_cp.rank() == 0


def global_name(local_name: str, model: nn.Module) -> str:
    """Return the parameter's name in a model that is not split: no wrappers, layers counted from the first stage,
    experts from the first rank.

    Layers and mixtures are asked for their numbers (`layer_number`, from 1, over all stages; `local_expert_indices`),
    so any layout is right.
    """
    name = _WRAPPERS.sub("", local_name)
    if match := _EXPERTS.search(name):
        mixture = cast(MoELayer, model.get_submodule(name[: match.start()]))
        number = mixture.local_expert_indices[int(match.group(1))]
        name = f"{name[: match.start(1)]}{number}{name[match.end(1) :]}"
    if match := _NUMBERED_LAYER.match(name):
        # An MTP layer is not a TransformerLayer, but has the same numbering.
        layer = cast(TransformerLayer, model.get_submodule(match.group(0).rstrip(".")))
        name = f"{match.group(1)}.layers.{layer.layer_number - 1}.{name[match.end() :]}"
    return _MTP_INNER_LAYER.sub(r"\1transformer_layer.", name)


def others_hold(model_chunks: Sequence[nn.Module], shards: Sequence[Shard]) -> Callable[[str], bool]:
    """Return whether another rank may hold a parameter that this rank does not hold.

    Pipeline stages split the layers (and the embedding, the final norm, the head), and expert-parallel ranks split the
    experts of a layer. Another rank may hold the parameter if the model has its layer or expert and this rank does not.
    The rank that holds the layer checks the parameter itself, so no communication is needed.
    """
    config = _unwrap(model_chunks[0]).config
    num_layers = {"decoder": config.num_layers, "mtp": config.mtp_num_layers or 0}
    held_modules = {_module_of(shard.name) for shard in shards}
    held_experts = {_expert_of(shard.name) for shard in shards}
    num_stages = _groups(model_chunks).pp.size()
    num_expert_ranks = _groups(model_chunks).ep.size()

    def may_be(name: str) -> bool:
        if _module_of(name) not in held_modules:
            layer = _NUMBERED_LAYER.match(name)
            is_in_model = layer is None or int(layer.group(2)) < num_layers[layer.group(1)]
            return num_stages > 1 and is_in_model
        expert = _EXPERTS.search(name)
        if expert is None or num_expert_ranks == 1:
            return False
        is_in_model = int(expert.group(1)) < (config.num_moe_experts or 0)
        return is_in_model and _expert_of(name) not in held_experts

    return may_be


def _module_of(name: str) -> str:
    """Return the unit that pipeline stages distribute: a layer, `decoder.layers.3.`, or a module,
    `decoder.final_layernorm`."""
    layer = _NUMBERED_LAYER.match(name)
    if layer:
        return layer.group(0)
    return ".".join(name.split(".")[:2])


def _expert_of(name: str) -> str | None:
    """Return the expert that a parameter belongs to, `decoder.layers.3.mlp.experts.local_experts.7.`."""
    expert = _EXPERTS.search(name)
    if not expert:
        return None
    return name[: expert.end()]


def mtp_num_layers(model_chunks: Sequence[nn.Module]) -> int:
    """Return the MTP depth that the model was built with, the same on every stage."""
    return _unwrap(model_chunks[0]).config.mtp_num_layers or 0


def _groups(model_chunks: Sequence[nn.Module]) -> ProcessGroupCollection:
    """Return the process groups of the model's mesh."""
    return _unwrap(model_chunks[0]).pg_collection


def _unwrap(chunk: nn.Module) -> GPTModel:
    return cast(GPTModel, unwrap_model(chunk))


def is_first_rank() -> bool:
    """Return whether this process does what must be done once."""
    return dist.get_rank() == 0


def gather_from_all_ranks(value: Any) -> list[Any]:
    """Return the value of each rank, in order; each must survive pickling."""
    values: list[Any] = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def all_ranks_see(directory: Path) -> bool:
    """Return whether all ranks see what the first rank puts into the directory; collective."""
    token: list[Any] = [f".seen-by-all-{uuid4().hex}"]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(token, src=0)
    mark = directory / token[0]
    if is_first_rank():
        mark.touch()
    barrier()
    seen = all(gather_from_all_ranks(mark.exists()))
    if is_first_rank():
        mark.unlink()
    return seen


def gather_on_first_rank(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces of all ranks on the first rank, one at a time, and none on the others; collective, to the
    end."""
    if is_first_rank():
        yield from pieces
        for source in range(1, dist.get_world_size()):
            yield from _receive(source)
        return
    for key, index, tensor in pieces:  # each send waits for its turn
        dist.send_object_list([(key, index, tuple(tensor.shape), tensor.dtype)], dst=0)
        dist.send(tensor.contiguous(), dst=0)
    dist.send_object_list([None], dst=0)


def _receive(source: int) -> Iterator[Piece]:
    device = torch.device("cpu" if dist.get_backend() == "gloo" else "cuda")
    while True:
        header: list[Any] = [None]
        dist.recv_object_list(header, src=source)
        if header[0] is None:
            return
        key, index, shape, dtype = header[0]
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, src=source)
        yield key, index, tensor


def barrier() -> None:
    """Wait for all processes."""
    if dist.get_world_size() > 1:
        dist.barrier()
