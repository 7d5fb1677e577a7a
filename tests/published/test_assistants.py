"""Test that published assistants of Gemma 4 can be trained: their settings, names and sizes of tensors."""

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, Gemma4AssistantForCausalLM

from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.rows import shapes_of
from swiftlite.families import index
from swiftlite.families.drafters import DrafterOptions, drafter_problems, with_drafter
from swiftlite.families.gemma4_assistant import PREFIX, why_not
from swiftlite.families.resolved import own_settings_of
from tests.published import library

ASSISTANT = Path(__file__).with_name("assistants") / "gemma-4-E2B-it-assistant.json"
KINDS = (["sliding_attention"] * 4 + ["full_attention"]) * 7
TRUNK = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 20,
    "layer_types": KINDS,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}
"""Sizes of Gemma 4 E2B; those of `configs/` are smaller."""


def test_the_assistant_of_e2b_has_the_published_tensors(tmp_path):
    """The hub's file has 50 tensors, and 77,731,328 parameters without the ids of tokens and the numbers of layers."""
    config = library.content("gemma-4-E2B-it")
    config["text_config"] |= TRUNK
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "assistant").mkdir()
    (tmp_path / "assistant" / "config.json").write_bytes(ASSISTANT.read_bytes())
    declared = with_drafter(read_config(tmp_path), DrafterOptions(own=own_settings_of(tmp_path / "assistant")))
    assert drafter_problems(declared) == []
    family = index.get(declared)
    assert why_not(family, declared) == ""
    shapes = shapes_of(family.head_rows(declared, 0))
    found = {name.removeprefix(PREFIX): shape for name, shape in shapes.items()}
    assert len(found) == 50
    buffers = [name for name in found if name.endswith(("token_ordering", "layer_scalar"))]
    assert sum(prod(shape) for name, shape in found.items() if name not in buffers) == 77_731_328
    of_theirs: Any = AutoConfig.from_pretrained(tmp_path / "assistant")
    with torch.device("meta"):
        theirs = Gemma4AssistantForCausalLM(of_theirs)
    state = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    assert found == state
