"""Test the places of adapters in a checkpoint on one rank. tests/parallel/test_lora.py uses several ranks."""

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import is_main_replica

from swiftlite.args.commands import SftArgs
from swiftlite.base.lora import is_adapter
from swiftlite.bridge.adapters.rows import A, B
from swiftlite.families.resolved import resolve
from swiftlite.model.layers.lora import Adapter, add_adapters
from swiftlite.model.open import open_model
from swiftlite.plan.heads import lora_of
from swiftlite.train.checkpoint.checkpointer import sharded_model
from tests.groups import SecondOfTwo, as_second_rank
from tests.tiny import make_tiny_hf


@pytest.fixture(params=["qwen3", "glm4_moe"])
def chunk(request, tmp_path, mesh) -> Any:
    """A model with adapters; the second model has experts."""
    hf_model = resolve(make_tiny_hf(tmp_path, request.param, depth=1))
    lora = lora_of(SftArgs(model=str(tmp_path), tuner_type="lora"), hf_model.heads)
    assert lora is not None
    chunks, _ = open_model(hf_model, mesh, dtype=torch.float32, heads=hf_model.heads)
    add_adapters(chunks, lora, hf_model.family.rows(hf_model.config, hf_model.heads.layers))
    return chunks[0]


def adapters(chunk: Any, mesh: Any) -> dict[str, Any]:
    (state,) = sharded_model([chunk], mesh).values()
    return {name: tensor for name, tensor in state.items() if is_adapter(name)}


@pytest.mark.parametrize("group", ["dp_cp", "expt_dp"])
def test_data_parallel_replicas_do_not_write(chunk, mesh, group):
    """The ranks that hold the same expert are not those that hold the same attention layer."""
    assert all(is_main_replica(tensor.replica_id) for tensor in adapters(chunk, mesh).values())
    for name, tensor in adapters(chunk, as_second_rank(mesh, group)).items():
        is_of_group = (".local_experts." in name) == (group == "expt_dp")
        assert is_main_replica(tensor.replica_id) is not is_of_group, name


def test_tensor_parallel_ranks_write_what_they_split(chunk, mesh):
    """If tensor parallelism splits the rows of a layer, it splits B of the adapter; if it splits the columns, it splits
    A.
    """
    whole = adapters(chunk, mesh)
    group: Any = SecondOfTwo()
    for module in chunk.modules():
        if isinstance(module, Adapter):
            module.group = group
    for name, tensor in adapters(chunk, mesh).items():
        layer, leaf = name.split(".adapter.")
        is_row_split = layer.endswith(("linear_qkv", "linear_fc1", "eh_proj"))
        rows, columns = whole[name].global_shape
        if is_row_split and leaf.startswith(B):
            expected = (2 * rows, columns), (rows, 0), True
        elif not is_row_split and leaf.startswith(A):
            expected = (rows, 2 * columns), (0, columns), True
        else:
            expected = (rows, columns), (0, 0), False
        assert (tensor.global_shape, tensor.global_offset, is_main_replica(tensor.replica_id)) == expected, name
