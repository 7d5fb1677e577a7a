"""A checkpoint as an engine that runs is given it: buckets of HF tensors, those of the heads apart."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from swiftlite.engines.served_model import resolve_served

Buckets = list[dict[str, torch.Tensor]]


def trunk_and_heads(directory: Path) -> tuple[Buckets, Buckets]:
    """A checkpoint's trunk and its heads, two buckets each; without copies of the trunk's tensors in the heads, and
    without other parts than the language model, as `bridge.transfer.stream_hf` brings them."""
    model = resolve_served(directory)
    copies = model.family.mtp.copies(model.config, 0)
    trunk, heads = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name in copies or model.family.is_carried(name):
            continue
        part = heads if model.family.is_mtp(model.config, name) else trunk
        part[name] = tensor
    return _in_two(trunk), _in_two(heads)


def _in_two(tensors: dict[str, torch.Tensor]) -> Buckets:
    """Every other tensor in the second one, so that no layer, and no expert, is whole before it."""
    entries = list(tensors.items())
    return [dict(entries[::2]), dict(entries[1::2])]
