"""Compute the logits of one tiny model in swiftlite and in transformers.

This module does not import pytest, because scripts/gpu runs it on machines without pytest.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.saving import save_hf
from swiftlite.bridge.transfer import load_hf
from swiftlite.families import index
from swiftlite.model.build import build_model
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.gpt import GPTModel
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.plan.trainable import HEADS_ONLY
from tests.tiny import CLASSES, WRAPPED, hub_name, memory_name, per_expert, transposed


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


def gradients(model: Any, directory: Path, out: Path) -> dict[str, torch.Tensor]:
    """Return the gradients of a model by the names of files. The weights are overwritten."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.grad)
    out.mkdir()
    hf_config = read_config(directory)
    save_hf([model], out, index.get(hf_config, directory), hf_config)
    return per_expert(load_file(out / "model.safetensors"))


def check_packed_rows(
    directory: Path, family: str, mesh: Any, lengths: Sequence[int], tolerance: float, *, in_chunks: bool = False
) -> None:
    """Compare the loss of a packed row, and the gradients of all tensors, with those of transformers for each sequence.

    Args:
        tolerance: largest difference of gradients, relative to the largest number of each.
        in_chunks: whether the logits are computed in chunks.
    """
    hf = load_transformers(directory, family, torch.float32)
    rows = [torch.randint(0, 128, (length,)) for length in lengths]
    loss: Any = 0.0
    for row in rows:
        loss += F.cross_entropy(hf(row[None], use_cache=False).logits[0, :-1], row[1:], reduction="sum")
    loss.backward()
    expected = {
        hub_name(family, name): tensor.grad for name, tensor in hf.named_parameters() if tensor.grad is not None
    }
    model: Any = load_megatron(directory, mesh, torch.float32)
    model.loss_in_chunks = in_chunks or model.loss_in_chunks
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = torch.cat([torch.cat([row[1:], torch.tensor([-100])]) for row in rows])[None]
    inputs = ModelInputs(torch.cat(rows)[None], positions, packed_seq_params=describe_packed(starts))
    found = model(inputs, Target(labels)).main.loss_BS.sum()
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
    found.backward()
    ours = gradients(model, directory, directory.with_name("gradients"))
    for name, gradient in per_expert(expected).items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=tolerance * float(gradient.abs().max()))
