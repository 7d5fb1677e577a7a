"""Determine which rank holds which part of a parameter.

This is the only module of `bridge` that uses megatron-core and process groups. Attributes of parameters describe how
they are split (`tensor_model_parallel`, `partition_dim`), and modules of layers and experts have their numbers as
attributes. Reading weights requires no collective operation. Writing requires only barriers if all ranks can access the
same files.
"""

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
# The decoder layer in an MTP layer is named transformer_layer up to megatron-core 0.16, and mtp_model_layer later.
_MTP_INNER_LAYER = re.compile(r"^(mtp\.layers\.\d+\.)mtp_model_layer\.")


Piece = tuple[str, Index, torch.Tensor]
"""A slice of an HF tensor: its key, the index of the slice, and its values."""


def shards_of(model_chunks: Sequence[nn.Module]) -> list[Shard]:
    """Return every parameter and persistent buffer of this rank, under its name in the whole model.

    Args:
        model_chunks: the GPTModel of this pipeline stage, or one per virtual stage; DDP and Float16Module wrappers are
            removed.
    """
    shards = []
    for chunk in model_chunks:
        model = _unwrap(chunk)
        # keep_vars, because a detached tensor does not have megatron-core's attributes.
        # state_dict instead of named_parameters, because it also has persistent buffers.
        for local_name, tensor in model.state_dict(keep_vars=True).items():
            if local_name.endswith("_extra_state"):  # None in megatron-core, FP8 state in Transformer Engine
                continue
            name = global_name(local_name, model)
            tp_rank, tp_size, is_first_replica = _sharing(local_name, model)
            # megatron-core sets these attributes only on parameters that it shards (layers.py:101).
            is_sharded = getattr(tensor, "tensor_model_parallel", False) and tp_size > 1
            # Unsplit parameters, such as norms, are equal on all tensor-parallel ranks: the first one writes.
            # A later stage with MTP layers holds a copy of the embedding; only the first stage writes it.
            is_stage_copy = name.startswith("embedding.") and not model.pre_process
            writes = is_first_replica and (is_sharded or tp_rank == 0) and not is_stage_copy
            shard = Shard(name, tensor.detach(), writes=writes)
            if is_sharded:
                partition_dim = tensor.partition_dim  # type: ignore[attr-defined]
                shard = replace(shard, partition_dim=partition_dim, tp_rank=tp_rank, tp_size=tp_size)
            shards.append(shard)
    # megatron-core 0.16 marks a weight as sharded only if it initializes it; gradient norms also depend on the mark.
    tp_size = _groups(model_chunks).tp.size()
    assert tp_size == 1 or any(shard.partition_dim is not None for shard in shards), (
        "no parameter is marked as tensor-parallel: build the model with perform_initialization=True"
    )
    return shards


def _sharing(local_name: str, model: GPTModel) -> tuple[int, int, bool]:
    """Return the index and number of the ranks that split a parameter, and whether this rank holds the first replica.

    Experts are split and replicated over other groups of ranks than the rest of the model.
    """
    if match := _EXPERTS.search(local_name):
        # SequentialMLP of megatron-core takes both groups from the expert groups of its collection (expt_tp, expt_dp).
        experts = cast(SequentialMLP, model.get_submodule(local_name[: match.start() + len(".experts")]))
        return experts.tp_group.rank(), experts.tp_group.size(), experts.dp_group.rank() == 0
    # dp_cp, because context-parallel ranks hold the same weights too.
    groups = model.pg_collection
    return groups.tp.rank(), groups.tp.size(), groups.dp_cp.rank() == 0


def global_name(local_name: str, model: nn.Module) -> str:
    """Return a parameter's name in the whole model, without wrappers.

    Layers are numbered over all pipeline stages, and experts over all expert-parallel ranks. The numbers are attributes
    of the modules (`layer_number`, from 1; `local_expert_indices`), so the result is correct for any layout.
    """
    name = _WRAPPERS.sub("", local_name)
    if match := _EXPERTS.search(name):
        mixture = cast(MoELayer, model.get_submodule(name[: match.start()]))
        # With 8 experts on 2 ranks, the first expert of the second rank is number 4.
        number = mixture.local_expert_indices[int(match.group(1))]
        name = f"{name[: match.start(1)]}{number}{name[match.end(1) :]}"
    if match := _NUMBERED_LAYER.match(name):
        # An MTP layer is not a TransformerLayer, but also has a layer_number.
        layer = cast(TransformerLayer, model.get_submodule(match.group(0).rstrip(".")))
        name = f"{match.group(1)}.layers.{layer.layer_number - 1}.{name[match.end() :]}"
    return _MTP_INNER_LAYER.sub(r"\1transformer_layer.", name)


def others_hold(model_chunks: Sequence[nn.Module], shards: Sequence[Shard]) -> Callable[[str], bool]:
    """Return a function that returns whether another rank can hold the parameter with a given name.

    Pipeline stages split the layers (and the embedding, the final norm and the output layer), and expert-parallel ranks
    split the experts of a layer. Another rank can hold a parameter if this rank does not hold the parameter's layer or
    expert. No communication is needed, because the rank that holds the layer checks the parameter. No rank holds
    decoder layers that are read one at a time (`layers.py`).
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
            # Layer 7 of a model with 4 layers is on no rank, in any layout: a row for it is a mistake.
            is_in_model = layer is None or int(layer.group(2)) < num_layers[layer.group(1)]
            is_in_files = not holds_decoder_layers(model_chunks) and decoder_layer_of(name) is not None
            return (num_stages > 1 or is_in_files) and is_in_model
        expert = _EXPERTS.search(name)
        if expert is None or num_expert_ranks == 1:
            return False
        is_in_model = int(expert.group(1)) < (config.num_moe_experts or 0)
        return is_in_model and _expert_of(name) not in held_experts

    return may_be


def _module_of(name: str) -> str:
    """Return the layer or module that pipeline stages distribute: `decoder.layers.3.` or `decoder.final_layernorm`."""
    layer = _NUMBERED_LAYER.match(name)
    if layer:
        return layer.group(0)
    return ".".join(name.split(".")[:2])


def holds_decoder_layers(model_chunks: Sequence[nn.Module]) -> bool:
    """Return whether the ranks hold the decoder layers. Otherwise they are read from files (`layers.py`)."""
    return getattr(_unwrap(model_chunks[0]).decoder, "holds_layers", True)


def decoder_layer_of(name: str) -> int | None:
    """Return the number (from 0) of the decoder layer that a parameter belongs to; None for other parameters."""
    layer = _NUMBERED_LAYER.match(name)
    if layer is None or layer.group(1) != "decoder":
        return None
    return int(layer.group(2))


def _expert_of(name: str) -> str | None:
    """Return a parameter's expert, such as `decoder.layers.3.mlp.experts.local_experts.7.`; None if it has none."""
    expert = _EXPERTS.search(name)
    if not expert:
        return None
    return name[: expert.end()]


def mtp_num_layers(model_chunks: Sequence[nn.Module]) -> int:
    """Return the number of MTP layers of the whole model."""
    return _unwrap(model_chunks[0]).config.mtp_num_layers or 0


def _groups(model_chunks: Sequence[nn.Module]) -> ProcessGroupCollection:
    """Return the process groups of the model's mesh."""
    return _unwrap(model_chunks[0]).pg_collection


def _unwrap(chunk: nn.Module) -> GPTModel:
    return cast(GPTModel, unwrap_model(chunk))


def is_first_rank() -> bool:
    """Return whether this is rank 0. Rank 0 does the work that must be done only once."""
    return dist.get_rank() == 0


def part_of_this_rank(items: Sequence[Any]) -> Sequence[Any]:
    """Return the part of a list that this rank processes, if all ranks process different parts."""
    return items[dist.get_rank() :: dist.get_world_size()]


def gather_from_all_ranks(value: Any) -> list[Any]:
    """Return the value of each rank, in order; values must be picklable."""
    values: list[Any] = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def all_ranks_see(directory: Path) -> bool:
    """Return whether all ranks can read files that the first rank writes to the directory. Collective."""
    # A new file: each machine can have a directory of this name on its own disk, also with old files.
    token: list[Any] = [f".seen-by-all-{uuid4().hex}"]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(token, src=0)
    mark = directory / token[0]
    if is_first_rank():
        mark.touch()
    barrier()
    # The gather also waits: every rank has looked for the file when it is removed below.
    seen = all(gather_from_all_ranks(mark.exists()))
    if is_first_rank():
        mark.unlink()
    return seen


def gather_on_first_rank(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces of all ranks on the first rank, one at a time, and none on other ranks.

    Collective: all ranks must iterate to the end.
    """
    if is_first_rank():
        yield from pieces
        for source in range(1, dist.get_world_size()):
            yield from _receive(source)
        return
    # Key, shape and dtype first, because the receiver has to allocate the tensor. A slice can have gaps between its
    # rows, and torch.distributed sends only contiguous memory.
    for key, index, tensor in pieces:  # a send blocks until rank 0 receives from this rank
        dist.send_object_list([(key, index, tuple(tensor.shape), tensor.dtype)], dst=0)
        dist.send(tensor.contiguous(), dst=0)
    dist.send_object_list([None], dst=0)


def _receive(source: int) -> Iterator[Piece]:
    # NCCL receives only into memory of a GPU.
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
