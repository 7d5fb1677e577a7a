"""Test that names in a checkpoint are those of megatron-core 0.16 in every release, so that runs
can resume in another.
"""

from typing import Any

import pytest
import torch

from swiftlite import families
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.model.build import build_model
from swiftlite.train.checkpoint.checkpointer import Checkpointer, load_checkpoint, sharded_model
from swiftlite.train.checkpoint.state import STATE_FILE, CheckpointState
from tests.tiny import make_tiny_hf

# Written down from 0.16.1; since 0.17 the attribute of an MTP layer that holds its decoder layer is `mtp_model_layer`.
MTP_NAMES = """
enorm.weight hnorm.weight eh_proj.weight final_layernorm.weight
transformer_layer.mlp.linear_fc1.layer_norm_weight transformer_layer.mlp.linear_fc1.weight
transformer_layer.mlp.linear_fc2.weight transformer_layer.self_attention.k_layernorm.weight
transformer_layer.self_attention.linear_proj.weight transformer_layer.self_attention.linear_qkv.layer_norm_weight
transformer_layer.self_attention.linear_qkv.weight transformer_layer.self_attention.q_layernorm.weight
"""


def names(tmp_path, mesh, family: str) -> set[str]:
    """Return the names of all tensors of a model with two decoder layers and one MTP layer."""
    hf_config = read_config(make_tiny_hf(tmp_path, family, depth=1))
    architecture = families.get(hf_config).architecture(hf_config)
    model = build_model(architecture, hf_config, mesh=mesh, dtype=torch.float32, heads=Heads(1))
    state: dict[str, Any] = sharded_model(model, mesh)["model0"]
    return {sharded.key for sharded in state.values() if not sharded.key.endswith("_extra_state")}


def test_names_of_an_mtp_layer(tmp_path, mesh):
    found = {name for name in names(tmp_path, mesh, "qwen3") if name.startswith("mtp.")}
    assert found == {f"mtp.layers.0.{name}" for name in MTP_NAMES.split()}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_no_name_follows_the_release(tmp_path, mesh, family):
    found = names(tmp_path, mesh, family)
    inner = {name.removeprefix("mtp.layers.0.") for name in found if name.startswith("mtp.layers.0.")}
    assert any(name.startswith("transformer_layer.self_attention.") for name in inner)
    assert not any("mtp_model_layer" in name for name in found)


def test_a_checkpoint_has_the_files_of_every_release(tmp_path, mesh):
    hf_config = read_config(make_tiny_hf(tmp_path / "hf", "qwen3"))
    architecture = families.get(hf_config).architecture(hf_config)
    model = build_model(architecture, hf_config, mesh=mesh, dtype=torch.float32, heads=Heads(0))
    for parameter in model[0].parameters():
        torch.nn.init.zeros_(parameter)
    Checkpointer(tmp_path, mesh, model, None, CheckpointState(step=0, mtp_num_layers=1, torch_dtype="float32")).save(1)
    files = {path.name for path in (tmp_path / "checkpoint-1").iterdir() if path.suffix != ".distcp"}
    assert files - {".metadata"} == {"common.pt", "metadata.json", "SHA256SUMS", STATE_FILE}
    load_checkpoint(tmp_path / "checkpoint-1", mesh, model)
