"""Define what references of drafters other than MTP heads share: their own tensors, with the names in files."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from tests.engines.reference import Reference


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
