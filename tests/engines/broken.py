"""Write checkpoints with one defect each, to test what an engine's own loaders find."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiers import some_of
from tests.tiny import LATENT, VLLM_LATENT_SIZES, make_tiny_hf, mtp_names

Tensors = dict[str, torch.Tensor]


def make(directory: Path, family: str, depth: int, **options: Any) -> Path:
    sizes: dict[str, Any] = VLLM_LATENT_SIZES if family in LATENT else {}
    return make_tiny_hf(directory, family, depth, **sizes, **options)


def projection(family: str) -> str:
    return mtp_names(family, 0)[0]["projection"]


def is_of_a_head(family: str, name: str) -> bool:
    return name.startswith(("mtp.", "model.mtp_", "model.layers.2."))


def without_heads(family: str, tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not is_of_a_head(family, name)}


def without_projection(family: str, tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != projection(family)}


def with_square_projection(family: str, tensors: Tensors) -> Tensors:
    return tensors | {projection(family): torch.zeros(64, 64)}


def with_another_name(family: str, tensors: Tensors) -> Tensors:
    name = projection(family)
    return without_projection(family, tensors) | {name.replace(name.split(".")[-2], "projection"): tensors[name]}


# name -> (heads in the tensors, heads that config.json promises, what happens to the tensors)
BROKEN: dict[str, tuple[int, int, Callable[[str, Tensors], Tensors] | None]] = {
    "no head": (1, 1, without_heads),
    "no projection": (1, 1, without_projection),
    "wrong shape": (1, 1, with_square_projection),
    "renamed": (1, 1, with_another_name),
    "extra head": (2, 1, None),
    "promises too much": (1, 2, None),
    "promises nothing": (1, 0, None),
}
BROKEN_FAMILIES = ("mimo", "qwen3", "glm4_moe", "deepseek_v3")
BROKEN_DAILY = ("mimo", "qwen3")
"""One family with an engine's own draft class, which loads whatever it finds, and one with a class of swiftlite."""


def daily_if_broken(*cases: tuple[str, str, str]) -> list[Any]:
    """Return family, defect and words as parameters. Cases of families that are not in BROKEN_DAILY are slow."""
    return some_of(cases, *(case for case in cases if case[0] in BROKEN_DAILY))


def write_broken(folder: Path, family: str, name: str) -> Path:
    """Write a model with the defect `name`; return its directory in `folder`."""
    depth, promised, change = BROKEN[name]
    directory = make(folder / f"{family}-{name.replace(' ', '-')}", family, depth)
    damage(directory, family, promised, change)
    return directory


def damage(
    directory: Path, family: str, promised: int, change: Callable[[str, Tensors], Tensors] | None, **config: Any
) -> None:
    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": promised} | config
    (directory / "config.json").write_text(json.dumps(config))
    if change is not None:
        file = directory / "model.safetensors"
        save_file(change(family, load_file(file)), file, metadata={"format": "pt"})
