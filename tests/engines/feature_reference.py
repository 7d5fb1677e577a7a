"""Define an MTP head with features in plain torch, without a cache, for the same comparisons as `reference.py`.

It shares only the names of tensors in files with swiftlite.
"""

import json
from pathlib import Path
from typing import Any

import torch

from tests.engines import drafter_reference
from tests.engines.drafter_reference import DrafterReference, add_tensors, load_trunk
from tests.engines.reference import stack_experts
from tests.tiny import embedded, head_in_files, make_tiny_model, memory_name

BLOCK = "mtp.layers.0."


class FeatureReference(DrafterReference):
    """A trunk of transformers with an MTP head that reads features; arguments are those of the base class."""

    output_norm = "mtp.norm"

    def __init__(self, trunk: Any, family: str, tensors: dict[str, torch.Tensor], features: list[int]):
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(BLOCK)}
        super().__init__(trunk, family, own, features)
        layer_class: Any = type(trunk.model.layers[-1])
        self.block = layer_class(trunk.config, layer_idx=trunk.config.num_hidden_layers - 1)
        block = {name.removeprefix(BLOCK): each for name, each in tensors.items() if name.startswith(BLOCK)}
        self.block.load_state_dict(stack_experts({memory_name(family, name): each for name, each in block.items()}))

    @classmethod
    def of(cls, trunk: Any, family: str, features: list[int]) -> "FeatureReference":
        """Return a trunk with a random head."""
        return cls(trunk, family, random_tensors(trunk, family, len(features)), features)

    @classmethod
    def load(cls, directory: Path, family: str, depth: int = 1) -> "FeatureReference":
        """Read a checkpoint whose config.json declares the head."""
        trunk, tensors, drafter = load_trunk(directory, family)
        return cls(trunk, family, tensors, drafter["feature_layers"]).eval()

    def mtp_tensors(self) -> dict[str, torch.Tensor]:
        block = {name: each.detach() for name, each in self.block.state_dict().items()}
        in_files = {BLOCK + name: each.contiguous() for name, each in head_in_files(self.family, block).items()}
        return super().mtp_tensors() | in_files

    def trunk_states(self, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the projection of state and features, and the states after the final norm, each [B, S, H]."""
        before: list[torch.Tensor] = []
        handle = self.trunk.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
        seen, after = self.features_of(ids_BS)
        handle.remove()
        normed = [self._normed(each, f"mtp.pre_fc_norm_hidden.{n}") for n, each in enumerate([*before, *seen])]
        return self._mapped(torch.cat(normed, dim=-1), "mtp.fc_first"), after

    def head_states(self, k: int, hidden_BSH: torch.Tensor, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the projection of the states for the next step, and the states after the output norm.

        Args:
            hidden_BSH: projected states, so that each position is one of the first or of a later step.
        """
        embedding = self._normed(embedded(self.trunk, ids_BS), "mtp.pre_fc_norm_embedding")
        rotary = self.trunk.model.rotary_emb(hidden_BSH, torch.arange(ids_BS.shape[1])[None])
        fused = self._mapped(embedding, "mtp.fc_embedding") + hidden_BSH
        before = self.block(fused, position_embeddings=rotary, attention_mask=self._mask(ids_BS.shape[1]))
        projected = self._mapped(self._normed(before, "mtp.pre_fc_norm_hidden.0"), "mtp.fc_later")
        return projected, self._normed(before, "mtp.norm")


def random_tensors(trunk: Any, family: str, num_features: int, std: float = 0.2) -> dict[str, torch.Tensor]:
    """Return a random head for a trunk of transformers."""
    hidden, number = trunk.config.hidden_size, trunk.config.num_hidden_layers - 1
    layer_class: Any = type(trunk.model.layers[-1])
    shapes = {name: each.shape for name, each in layer_class(trunk.config, number).state_dict().items()}
    block = {name: (len(shape) == 1) + torch.randn(shape) * std for name, shape in shapes.items()}
    tensors = {BLOCK + name: each for name, each in head_in_files(family, block).items()}
    matrices = {"fc_embedding": 1, "fc_first": 1 + num_features, "fc_later": 1}
    tensors |= {f"mtp.{name}.weight": torch.randn(hidden, width * hidden) * std for name, width in matrices.items()}
    norms = ["norm", "pre_fc_norm_embedding", *(f"pre_fc_norm_hidden.{n}" for n in range(1 + num_features))]
    return tensors | {f"mtp.{name}.weight": 1 + torch.randn(hidden) * std for name in norms}


def declared(features: list[int]) -> dict[str, Any]:
    """Return what config.json declares for a head."""
    return {"kind": "mtp_features", "layers": 1, "feature_layers": features}


def declare(directory: Path, features: list[int]) -> Path:
    """Let config.json declare the head; return the directory."""
    return drafter_reference.declare(directory, declared(features))


def add_head(directory: Path, family: str, features: list[int]) -> Path:
    """Add a random head to a model without heads; return the directory."""
    config = json.loads((directory / "config.json").read_text())
    overrides = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "dtype")}
    trunk = make_tiny_model(family, config["tie_word_embeddings"], **overrides)
    return add_tensors(directory, random_tensors(trunk, family, len(features)), declared(features))
