"""Test parameter counts in the sizes in which models are published."""

import copy
import json
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.setup import ImageSetup, Setup
from tests.published import library


class Published(NamedTuple):
    """A published vision-language model.

    Attributes:
        text, vision: sizes of the language model and of its tower in config.json; those in `configs/` are smaller.
        total: number of parameters, as the hub shows it.
        tower: number of parameters of the tower.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    total: int
    tower: int


VISION_OF_QWEN2_5 = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
VISION_OF_QWEN2_5 |= {"fullatt_block_indexes": [7, 15, 23, 31]}
PUBLISHED = {
    "Qwen2.5-VL-3B-Instruct": Published(
        {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36}
        | {"num_key_value_heads": 2, "vocab_size": 151936},
        VISION_OF_QWEN2_5 | {"out_hidden_size": 2048},
        total=3_754_622_976,
        tower=668_684_288,
    ),
    "Qwen2.5-VL-7B-Instruct": Published(
        {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28}
        | {"num_key_value_heads": 4, "vocab_size": 152064},
        VISION_OF_QWEN2_5 | {"out_hidden_size": 3584},
        total=8_292_166_656,
        tower=676_550_144,
    ),
    "Qwen3-VL-4B-Instruct": Published(
        {"head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32}
        | {"num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151936},
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560}
        | {"deepstack_visual_indexes": [5, 11, 17], "num_position_embeddings": 2304},
        total=4_437_815_808,
        tower=415_347_712,
    ),
}

_NANO_3 = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
LIGHTNING = [{"M": "mamba", "*": "attention", "E": "moe"}[letter] for letter in _NANO_3]
WINDOWS = ["sliding_attention", "full_attention"]
TEXT: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.1-8B": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"num_key_value_heads": 8, "vocab_size": 128256},
        8_030_261_248,
    ),
    "MiMo-7B-RL": (
        {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 36}
        | {"num_key_value_heads": 8, "vocab_size": 151680},
        7_833_409_536,
    ),
    "NVIDIA-Nemotron-3.5-Lightning-30B-A3B": (
        {"hidden_size": 2688, "layers_block_type": LIGHTNING, "mamba_head_dim": 64, "mamba_num_heads": 64}
        | {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128}
        | {"num_attention_heads": 32, "num_hidden_layers": 52, "ssm_state_size": 128, "vocab_size": 131072},
        32_913_263_168,  # as on the hub, without 24 * 128 biases of routers, which are not trained by gradients
    ),
    "Phi-4": (
        {"hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40, "num_hidden_layers": 40}
        | {"num_key_value_heads": 10, "vocab_size": 100352},
        14_659_507_200,
    ),
    "Qwen3-30B-A3B": (
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_hidden_layers": 48}
        | {"num_key_value_heads": 4, "num_experts": 128, "vocab_size": 151936},
        30_532_122_624,
    ),
    "Qwen3-Coder-480B-A35B-Instruct": (
        {"hidden_size": 6144, "moe_intermediate_size": 2560, "num_attention_heads": 96, "num_hidden_layers": 62}
        | {"head_dim": 128, "num_key_value_heads": 8, "num_experts": 160, "vocab_size": 151936},
        480_154_875_392,
    ),
    "gpt-oss-20b": (
        {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_hidden_layers": 24}
        | {"layer_types": WINDOWS * 12, "num_key_value_heads": 8, "num_local_experts": 32, "vocab_size": 201088},
        20_914_757_184,
    ),
    "gpt-oss-120b": (
        {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_hidden_layers": 36}
        | {"layer_types": WINDOWS * 18, "num_key_value_heads": 8, "num_local_experts": 128, "vocab_size": 201088},
        116_829_156_672,
    ),
    "GLM-5": (
        {"hidden_size": 6144, "intermediate_size": 12288, "num_attention_heads": 64, "num_hidden_layers": 78}
        | {"num_key_value_heads": 64, "n_routed_experts": 256, "moe_intermediate_size": 2048, "q_lora_rank": 2048}
        | {"vocab_size": 154880},
        753_864_139_008 - 76 * 256,  # the hub also counts the biases of routers, which are not trained by gradients
    ),
}
"""Sizes of text models, and their numbers of parameters, as the hub shows them; some with heads."""


@pytest.fixture(params=PUBLISHED)
def model(request, tmp_path):
    """Return the facts of a model, and a directory with its config.json."""
    facts = PUBLISHED[request.param]
    config = copy.deepcopy(library.content(request.param))
    text = config.get("text_config", config)
    assert facts.text.keys() <= text.keys()
    text |= facts.text
    config["vision_config"] |= facts.vision
    (tmp_path / "config.json").write_text(json.dumps(config))
    return facts, tmp_path


def count(directory, **setup: Any) -> int:
    (stage,) = estimate(read_config(directory), Setup(**setup))
    return stage.parameters


IMAGES = ImageSetup(items_per_row=980)


def test_parameters_are_the_published_ones(model):
    facts, directory = model
    assert count(directory, images=IMAGES) == facts.total
    assert count(directory) == facts.total - facts.tower
    with torch.device("meta"):
        hf = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(directory))
    assert hf.num_parameters() == facts.total
    assert sum(parameter.numel() for parameter in hf.model.visual.parameters()) == facts.tower


@pytest.mark.parametrize("name", TEXT)
def test_parameters_of_text_models_are_the_published_ones(name, tmp_path):
    sizes, total = TEXT[name]
    config = library.content(name)
    assert sizes.keys() <= config.keys()
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    depth = 1 if config["model_type"] in library.HEADS else 0
    assert count(tmp_path, heads=Heads(depth)) == total


def test_parameters_of_nemotron_nano_2_are_the_published_ones(tmp_path):
    """Its config.json states two sizes a second time, as `mamba_num_groups` and `mamba_state_dim`, which no program
    reads. Here are the settings that determine shapes; all others are those of Nemotron-H."""
    sizes = {"hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128, "mamba_head_dim": 80, "mamba_num_heads": 128, "num_hidden_layers": 56}
    sizes |= {"ssm_state_size": 128, "mamba_state_dim": 128, "n_groups": 8, "mamba_num_groups": 8, "vocab_size": 131072}
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    config = library.content("Nemotron-H-56B-Base-8K") | sizes | {"hybrid_override_pattern": pattern}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert count(tmp_path) == 8_888_227_328


def test_a_new_head_is_a_decoder_layer_with_a_projection(model):
    facts, directory = model
    head = count(directory, images=IMAGES, heads=Heads(1)) - facts.total
    config = json.loads((directory / "config.json").read_text())
    text, hidden = config.get("text_config", config), facts.text["hidden_size"]
    text["num_hidden_layers"] += 1
    (directory / "config.json").write_text(json.dumps(config))
    layer = count(directory, images=IMAGES) - facts.total
    assert head == layer + 2 * hidden * hidden + 3 * hidden  # eh_proj and three norms
