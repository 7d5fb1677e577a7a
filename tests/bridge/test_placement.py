"""Test names and ownership of parameters on a real model, with the attributes that later stages and
releases give it.
"""

from copy import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from megatron.core.transformer import TransformerLayer

from swiftlite import families
from swiftlite.base.heads import Heads
from swiftlite.bridge import placement
from swiftlite.bridge.hf_config import read_config
from swiftlite.model.build import build_model
from swiftlite.model.gpt import GPTModel
from swiftlite.runtime.compat import MTP_INNER_LAYER
from tests.groups import SecondOfTwo
from tests.tiny import make_tiny_hf


@pytest.fixture
def model(tmp_path: Path, mesh) -> GPTModel:
    hf_config = read_config(make_tiny_hf(tmp_path, "qwen3", depth=1))
    architecture = families.get(hf_config).architecture(hf_config)
    return build_model(architecture, hf_config, mesh=mesh, dtype=torch.float32, heads=Heads(1))[0]


@pytest.fixture
def mixture(tmp_path: Path, mesh) -> GPTModel:
    """Return a model with four experts."""
    hf_config = read_config(make_tiny_hf(tmp_path, "qwen3_moe"))
    architecture = families.get(hf_config).architecture(hf_config)
    return build_model(architecture, hf_config, mesh=mesh, dtype=torch.float32, heads=Heads(0))[0]


def shards(model: torch.nn.Module) -> dict[str, Any]:
    return {shard.name: shard for shard in placement.shards_of([model])}


def share(model: GPTModel, **groups: SecondOfTwo) -> None:
    """Give the model other process groups."""
    model.pg_collection = copy(model.pg_collection)
    for name, group in groups.items():
        setattr(model.pg_collection, name, group)


def test_a_model_that_is_not_split(model):
    held = shards(model)
    parameters = {placement.global_name(name, model): parameter for name, parameter in model.named_parameters()}
    assert list(held) == list(parameters)
    for name, parameter in parameters.items():
        assert held[name].tensor.data_ptr() == parameter.data_ptr()
        assert held[name].global_shape == tuple(parameter.shape)
        assert held[name].writes


def test_layers_of_a_later_stage_are_counted_from_the_first(model):
    for layer in model.decoder.layers:
        cast(TransformerLayer, layer).layer_number += 6
    numbers = {name.split(".")[2] for name in shards(model) if name.startswith("decoder.layers.")}
    assert numbers == {"6", "7"}
    assert "mtp.layers.0.enorm.weight" in shards(model)


def test_embedding_copy_of_a_later_stage_is_not_written(model):
    model.pre_process = False
    assert [name for name, shard in shards(model).items() if not shard.writes] == ["embedding.word_embeddings.weight"]


@pytest.mark.parametrize("inner_name", ["transformer_layer", "mtp_model_layer"])
def test_the_inner_mtp_layer_has_one_name_whatever_the_release_calls_it(model, inner_name):
    layer = model.get_submodule("mtp.layers.0")
    inner = layer.get_submodule(MTP_INNER_LAYER)
    delattr(layer, MTP_INNER_LAYER)
    layer.add_module(inner_name, inner)
    assert any(f"mtp.layers.0.{inner_name}." in name for name, _ in model.named_parameters())
    assert "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight" in shards(model)
    assert not any("mtp_model_layer" in name for name in shards(model))


def test_persistent_buffers_are_parameters_too(model):
    """A router's expert bias is such a buffer."""
    layer = model.get_submodule("decoder.layers.1.mlp")
    layer.register_buffer("expert_bias", torch.ones(4))
    layer.register_buffer("scratch", torch.ones(4), persistent=False)
    added = [name for name in shards(model) if not name.endswith(("weight", "bias")) or "expert" in name]
    assert added == ["decoder.layers.1.mlp.expert_bias"]


def test_what_tensor_parallel_ranks_share_and_who_writes_the_rest(model):
    """megatron-core splits column-parallel layers along axis 0 and row-parallel layers along axis 1."""
    share(model, tp=SecondOfTwo())
    held = shards(model)
    layer = "decoder.layers.0."
    cut = {
        "embedding.word_embeddings.weight": 0,
        "output_layer.weight": 0,
        f"{layer}self_attention.linear_qkv.weight": 0,
        f"{layer}self_attention.linear_proj.weight": 1,
        f"{layer}mlp.linear_fc1.weight": 0,
        f"{layer}mlp.linear_fc2.weight": 1,
        "mtp.layers.0.eh_proj.weight": 0,
    }
    for name, axis in cut.items():
        shard = held[name]
        assert (shard.partition_dim, shard.tp_rank, shard.tp_size, shard.writes) == (axis, 1, 2, True), name
    whole = [name for name, shard in held.items() if shard.partition_dim is None]
    assert whole == [name for name in held if "norm" in name]
    assert {(held[name].tp_rank, held[name].tp_size, held[name].writes) for name in whole} == {(0, 1, False)}


def test_replicas_do_not_write(model):
    share(model, dp_cp=SecondOfTwo())
    assert not any(shard.writes for shard in shards(model).values())


def test_a_model_whose_sharing_is_not_marked_is_noticed(model):
    share(model, tp=SecondOfTwo())
    for parameter in model.parameters():
        parameter.tensor_model_parallel = False
    with pytest.raises(AssertionError, match="tensor-parallel"):
        shards(model)


def test_what_other_pipeline_stages_hold(model):
    """This stage has decoder layer 1 of 2, the only MTP layer, and no embedding."""
    del model.embedding
    del model.decoder.layers[0]
    names = [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.1.mlp.linear_fc3.weight",
        "decoder.layers.2.mlp.linear_fc1.weight",
        "decoder.final_layernorm.bias",
        "mtp.layers.0.bias",
        "mtp.layers.1.enorm.weight",
    ]

    def elsewhere() -> list[str]:
        may_be = placement.others_hold([model], placement.shards_of([model]))
        return [name for name in names if may_be(name)]

    assert elsewhere() == []
    share(model, pp=SecondOfTwo())
    assert elsewhere() == names[:2]


def test_no_stage_holds_heads_of_a_model_without_any(mixture):
    share(mixture, pp=SecondOfTwo())
    may_be = placement.others_hold([mixture], placement.shards_of([mixture]))
    assert not may_be("mtp.layers.0.enorm.weight")


def test_what_other_ranks_of_experts_hold(mixture):
    """This rank has experts 2 and 3 of 4, numbered from 0."""
    for layer in mixture.decoder.layers:
        del layer.mlp.experts.local_experts[2:]
        layer.mlp.local_expert_indices = [2, 3]
    held = shards(mixture)
    numbers = {name.split(".")[6] for name in held if ".local_experts." in name}
    assert numbers == {"2", "3"}
    prefix = "decoder.layers.1.mlp.experts.local_experts."
    names = [f"{prefix}{number}.linear_fc1.weight" for number in range(5)]
    names += [f"{prefix}2.linear_fc1.bias", "decoder.layers.1.mlp.router.bias", "decoder.layers.9.mlp.router.weight"]

    def elsewhere() -> list[str]:
        may_be = placement.others_hold([mixture], list(held.values()))
        return [name for name in names if may_be(name)]

    assert elsewhere() == []
    share(mixture, ep=SecondOfTwo())
    assert elsewhere() == names[:2]
