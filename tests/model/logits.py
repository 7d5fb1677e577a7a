"""Compute the logits of one tiny model in swiftlite and in transformers.

This module does not import pytest, because scripts/gpu runs it on machines without pytest.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.transfer import load_hf
from swiftlite.families import index
from swiftlite.model.build import build_model
from swiftlite.model.gpt import GPTModel
from swiftlite.plan.trainable import HEADS_ONLY
from tests.tiny import CLASSES, WRAPPED, memory_name, transposed


def load_megatron(directory: Path, mesh, dtype: torch.dtype, **options) -> GPTModel:
    hf_config = read_config(directory)
    family = index.get(hf_config)
    options = {"heads": Heads.from_config(hf_config), **options}
    (model,) = build_model(family.architecture(hf_config), hf_config, mesh=mesh, dtype=dtype, **options)
    if options.get("freeze_trunk"):
        HEADS_ONLY.apply([model])
    load_hf([model], directory, family, hf_config)
    return model.eval()


WITHOUT_WRAPPER = {"^model.language_model": "model", "^language_model.": ""}
"""Prefixes of the language model in files of vision-language models, and in files of the language model alone."""


def load_transformers(directory: Path, family: str, dtype: torch.dtype):
    config_class, model_class = CLASSES[family]
    values = json.loads((directory / "config.json").read_text())
    values = values.get("text_config", values)
    source, state = directory, None
    if family == "qwen3_vl_moe":  # the class of the language model alone does not read transposed stacks
        files = load_file(directory / "model.safetensors").items()
        source, state = None, transposed({memory_name(family, name): tensor for name, tensor in files})
    # from_pretrained and not model.to(dtype), which would round the rotary frequencies too.
    return model_class.from_pretrained(
        source,
        state_dict=state,
        config=config_class.from_dict(values | {"model_type": config_class.model_type}),
        dtype=dtype,
        key_mapping=WITHOUT_WRAPPER if family in WRAPPED else None,
        experts_implementation="eager",  # one expert after the other, in the order in which we sum
    ).eval()


def ids_and_positions(length: int, rows: int = 2, vocab_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, vocab_size, (rows, length)), torch.arange(length).expand(rows, length)
