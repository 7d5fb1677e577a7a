"""Logits of tiny models of all kinds of layers against transformers, on the same device."""

import tempfile
from pathlib import Path

import torch
from result import Results, Settings

from swiftlite.runtime.distributed import session
from tests.model.test_logits import ids_and_positions, load_megatron, load_transformers
from tests.tiny import make_tiny_hf

FAMILIES = ("llama", "qwen3", "mimo", "qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next")
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Parts of the largest logit."""


def run(settings: Settings, results: Results) -> None:
    families = FAMILIES[:2] if settings.tiny else FAMILIES
    with session() as mesh, tempfile.TemporaryDirectory() as root, torch.no_grad():
        device = mesh.device.torch_device
        for family in families:
            for dtype, bound in BOUNDS.items():
                word = str(dtype).removeprefix("torch.")
                directory = make_tiny_hf(Path(root) / f"{family} {word}", family, dtype=dtype)
                input_ids, position_ids = (tensor.to(device) for tensor in ids_and_positions(48))
                ours = load_megatron(directory, mesh, dtype)(input_ids, position_ids).main
                theirs = load_transformers(directory, family, dtype).to(device)(input_ids).logits
                difference = (ours.double() - theirs.double()).abs().max() / theirs.abs().max()
                results.at_most(f"{family}, {word}", float(difference), bound)
