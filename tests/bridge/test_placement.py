"""Names and ownership of parameters, on a real model put into the states that later stages and releases have."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from megatron.core.transformer import TransformerLayer

from swiftlite import families
from swiftlite.bridge import placement
from swiftlite.bridge.hf_config import read_config
from swiftlite.heads import Heads
from swiftlite.model.build import build_model
from swiftlite.model.gpt import GPTModel
from swiftlite.runtime.compat import MTP_INNER_LAYER
from tests.tiny import make_tiny_hf


@pytest.fixture
def model(tmp_path: Path, mesh) -> GPTModel:
    hf_config = read_config(make_tiny_hf(tmp_path, "qwen3", depth=1))
    architecture = families.get(hf_config).architecture(hf_config)
    return build_model(architecture, hf_config, mesh=mesh, dtype=torch.float32, heads=Heads(1))[0]


def shards(model: torch.nn.Module) -> dict[str, Any]:
    return {shard.name: shard for shard in placement.shards_of([model])}


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
    """A router's expert bias will be one."""
    layer = model.get_submodule("decoder.layers.1.mlp")
    layer.register_buffer("expert_bias", torch.ones(4))
    layer.register_buffer("scratch", torch.ones(4), persistent=False)
    added = [name for name in shards(model) if not name.endswith(("weight", "bias")) or "expert" in name]
    assert added == ["decoder.layers.1.mlp.expert_bias"]
