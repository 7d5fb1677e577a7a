"""Test directories of adapters: what they can contain, and which base model they match."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swiftlite.base.errors import UserError
from swiftlite.bridge.adapters.files import read_adapter
from tests.messages import naming

MODULE = "model.layers.0.self_attn.q_proj"
OUT, IN, RANK = 6, 5, 2


def write_adapter(directory: Path, **config: object) -> Path:
    """Write a directory as PEFT does, with adapters of one linear layer."""
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    prefix = f"base_model.model.{MODULE}"
    tensors = {f"{prefix}.lora_A.weight": torch.ones(RANK, IN), f"{prefix}.lora_B.weight": torch.ones(OUT, RANK)}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def test_adapters_are_added_to_their_layer(tmp_path):
    adapter = read_adapter(write_adapter(tmp_path))
    adapter.check_places({f"{MODULE}.weight": (OUT, IN)})
    found = adapter.apply(f"{MODULE}.weight", torch.zeros(OUT, IN))
    assert found.equal(torch.full((OUT, IN), 4 / RANK * RANK))  # alpha / r times B @ A, whose elements are r


@pytest.mark.parametrize("shapes", [{}, {f"{MODULE}.weight": (IN, OUT)}], ids=["missing", "other shape"])
def test_another_model_is_refused(tmp_path, shapes):
    adapter = read_adapter(write_adapter(tmp_path))
    with pytest.raises(UserError, match=naming(f"--adapters {MODULE}.weight")):
        adapter.check_places(shapes)


@pytest.mark.parametrize(
    ("key", "value"), [("peft_type", "IA3"), ("bias", "all"), ("rank_pattern", {"q_proj": 4}), ("lora_bias", True)]
)
def test_what_is_not_plain_lora_is_refused(tmp_path, key, value):
    with pytest.raises(UserError, match=naming(f"--adapters {key}")):
        read_adapter(write_adapter(tmp_path, **{key: value}))
