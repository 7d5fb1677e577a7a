"""Test the parameter counts of vision-language models in the sizes in which they are published."""

import copy
import json
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from swiftlite.bridge.hf_config import read_config
from swiftlite.estimate.memory import estimate
from swiftlite.estimate.setup import ImageSetup, Setup
from swiftlite.heads import Heads
from tests.published import library


class Published(NamedTuple):
    """A published model.

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


def test_a_new_head_is_a_decoder_layer_with_a_projection(model):
    facts, directory = model
    head = count(directory, images=IMAGES, heads=Heads(1)) - facts.total
    config = json.loads((directory / "config.json").read_text())
    text, hidden = config.get("text_config", config), facts.text["hidden_size"]
    text["num_hidden_layers"] += 1
    (directory / "config.json").write_text(json.dumps(config))
    layer = count(directory, images=IMAGES) - facts.total
    assert head == layer + 2 * hidden * hidden + 3 * hidden  # eh_proj and three norms
