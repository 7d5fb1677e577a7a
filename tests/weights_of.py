"""Read a checkpoint as weights for a running engine: buckets of HF tensors, with the heads in separate buckets."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from swiftlite.engines.served_model import resolve_served

Buckets = list[dict[str, torch.Tensor]]


def trunk_and_heads(directory: Path) -> tuple[Buckets, Buckets]:
    """Return a checkpoint's trunk and its heads as two buckets each, as `bridge.saving.stream_hf` yields them.

    Copies of the trunk's tensors in heads, and parts other than the language model, are omitted.
    """
    model = resolve_served(directory)
    copies = model.family.mtp.copies(model.config, 0)
    trunk, heads = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name in copies or model.family.is_carried(model.config, name):
            continue
        part = heads if model.family.is_mtp(model.config, name) else trunk
        part[name] = tensor
    return _in_two(trunk), _in_two(heads)


def _in_two(tensors: dict[str, torch.Tensor]) -> Buckets:
    """Put every second tensor into the second bucket, so that no layer and no expert is complete before it."""
    entries = list(tensors.items())
    return [dict(entries[::2]), dict(entries[1::2])]
