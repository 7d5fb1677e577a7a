"""A checkpoint as an engine that runs is given it: buckets of HF tensors, those of the heads apart."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from swiftlite.engines.served_model import read_model

Buckets = list[dict[str, torch.Tensor]]


def trunk_and_heads(directory: Path) -> tuple[Buckets, Buckets]:
    """A checkpoint's trunk and its heads, a bucket each; without the copies of the trunk's tensors that heads have."""
    model = read_model(directory)
    copies = model.family.mtp.copies(model.hf_config, 0)
    trunk, heads = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name in copies:
            continue
        part = heads if model.family.is_mtp(model.hf_config, name) else trunk
        part[name] = tensor
    return [trunk], [heads]
