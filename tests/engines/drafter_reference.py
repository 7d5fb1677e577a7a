"""Define what references of drafters other than MTP heads share: their own tensors, with the names in files."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import linear

from tests.engines.reference import Reference, stack_experts
from tests.tiny import make_tiny_model, memory_name


class DrafterReference(Reference):
    """A trunk of transformers with a drafter.

    Args:
        tensors: tensors of the drafter, with the names in files.
        features: numbers of the decoder layers whose inputs it reads.
    """

    output_norm = "norm"

    def __init__(self, trunk: Any, family: str, tensors: dict[str, torch.Tensor], features: list[int]):
        nn.Module.__init__(self)
        self.trunk, self.family, self.depth = trunk, family, 1
        self.features, self.draft_vocab = features, []
        trunk.set_experts_implementation("eager")
        self.own = nn.ParameterDict({name.replace(".", "/"): tensor for name, tensor in tensors.items()})
        output_norm = nn.Module()
        output_norm.weight = self.own[f"{self.output_norm}.weight".replace(".", "/")]
        self.heads = nn.ModuleList([nn.ModuleDict({"output_norm": output_norm})])

    def mtp_tensors(self) -> dict[str, torch.Tensor]:
        return {name.replace("/", "."): tensor.detach().contiguous() for name, tensor in self.own.items()}

    def features_of(self, ids_BS: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the features, and the states after the final norm, each [B, S, H]."""
        seen: list[torch.Tensor] = []
        layers = [self.trunk.model.layers[number] for number in self.features]
        handles = [layer.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for layer in layers]
        after = self.trunk.model(ids_BS, use_cache=False).last_hidden_state
        for handle in handles:
            handle.remove()
        return seen, after

    def _mapped(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        return linear(hidden, self.own[f"{name}.weight".replace(".", "/")])

    def _normed(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        epsilon = self.trunk.config.rms_norm_eps
        normed = hidden * (hidden.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
        return normed * self.own[f"{name}.weight".replace(".", "/")]


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def load_trunk(directory: Path, family: str) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """Read a checkpoint whose config.json declares a drafter.

    Returns:
        the trunk, the tensors of the drafter with their names in files, and its declaration.
    """
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    overrides = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "dtype", "drafter")}
    trunk: Any = make_tiny_model(family, config["tie_word_embeddings"], **overrides)
    named = {memory_name(family, name): tensor for name, tensor in tensors.items()}
    missing, _ = trunk.load_state_dict(stack_experts(named), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    trunk.tie_weights()
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(("model.", "lm_head."))}
    return trunk, own, config["drafter"]


def declare(directory: Path, drafter: dict[str, Any]) -> Path:
    """Let config.json declare a drafter instead of MTP heads; return the directory."""
    config = json.loads((directory / "config.json").read_text())
    config.pop("num_nextn_predict_layers", None)
    (directory / "config.json").write_text(json.dumps({**config, "drafter": drafter}, indent=2))
    return directory


def add_tensors(directory: Path, tensors: dict[str, torch.Tensor], drafter: dict[str, Any]) -> Path:
    """Add the tensors of a drafter to a model without heads, and declare it; return the directory."""
    whole = load_file(directory / "model.safetensors") | tensors
    whole = {name: tensor.contiguous() for name, tensor in whole.items()}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    return declare(directory, drafter)
