"""Define EAGLE-3 in plain torch, without a cache, for the same comparisons as `tests/engines/reference.py`.

It shares only the names of tensors in published files with swiftlite.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu

from tests.engines import drafter_reference
from tests.engines.drafter_reference import DrafterReference, add_tensors, load_trunk, rotated
from tests.tiny import embedded

VERSIONS: dict[str, dict[str, bool]] = {
    "3.0": {"fc_norm": False, "norm_output": False},
    "3.1": {"fc_norm": True, "norm_output": True},
}


def declared(version: str, features: list[int]) -> dict[str, Any]:
    """Return what config.json declares for a drafter."""
    return {"kind": "eagle3", "layers": 1, "feature_layers": features, **VERSIONS[version]}


def random_tensors(
    config: dict[str, Any], num_features: int, version: str, std: float = 0.2
) -> dict[str, torch.Tensor]:
    """Return a random drafter for a trunk with this config.json."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, num_features * hidden), "norm": (hidden,)}
    shapes |= {"midlayer.self_attn.q_proj": (queries, 2 * hidden), "midlayer.self_attn.o_proj": (hidden, queries)}
    shapes |= {f"midlayer.self_attn.{name}_proj": (keys, 2 * hidden) for name in "kv"}
    shapes |= {f"midlayer.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    shapes["midlayer.mlp.down_proj"] = (hidden, inner)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes |= {f"midlayer.{name}": (hidden,) for name in norms}
    if VERSIONS[version]["fc_norm"]:
        shapes |= {f"fc_norm.{number}": (hidden,) for number in range(num_features)}
    return {f"{name}.weight": (len(shape) == 1) + torch.randn(shape) * std for name, shape in shapes.items()}


class Eagle3Reference(DrafterReference):
    """A trunk of transformers with an EAGLE-3 drafter.

    Args:
        tensors: tensors of the drafter, with the names in files.
        features: numbers of the decoder layers whose inputs it reads.
    """

    def __init__(self, trunk: Any, family: str, tensors: dict[str, torch.Tensor], features: list[int], version: str):
        super().__init__(trunk, family, tensors, features)
        self.version = version

    @classmethod
    def of(cls, trunk: Any, family: str, features: list[int], version: str) -> "Eagle3Reference":
        """Return a trunk with a random drafter."""
        return cls(trunk, family, random_tensors(trunk.config.to_dict(), len(features), version), features, version)

    @classmethod
    def load(cls, directory: Path, family: str, depth: int = 1) -> "Eagle3Reference":
        """Read a checkpoint whose config.json declares the drafter."""
        trunk, tensors, drafter = load_trunk(directory, family)
        return cls(trunk, family, tensors, drafter["feature_layers"], "3.1" if drafter["fc_norm"] else "3.0").eval()

    def trunk_states(self, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the fused features, and the states after the final norm, each [B, S, H]."""
        seen, after = self.features_of(ids_BS)
        if VERSIONS[self.version]["fc_norm"]:
            seen = [self._normed(feature, f"fc_norm.{number}") for number, feature in enumerate(seen)]
        return self._mapped(torch.cat(seen, dim=-1), "fc"), after

    def head_states(self, k: int, hidden_BSH: torch.Tensor, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = self._normed(embedded(self.trunk, ids_BS), "midlayer.input_layernorm")
        pair = torch.cat((embedding, self._normed(hidden_BSH, "midlayer.hidden_norm")), dim=-1)
        state = hidden_BSH + self._attention(pair)
        inner = self._normed(state, "midlayer.post_attention_layernorm")
        gated = silu(self._mapped(inner, "midlayer.mlp.gate_proj")) * self._mapped(inner, "midlayer.mlp.up_proj")
        before = state + self._mapped(gated, "midlayer.mlp.down_proj")
        after = self._normed(before, "norm")
        return (after if VERSIONS[self.version]["norm_output"] else before), after

    def _attention(self, pair_BSH: torch.Tensor) -> torch.Tensor:
        length, heads = pair_BSH.shape[1], self.trunk.config.num_attention_heads
        cos, sin = self.trunk.model.rotary_emb(pair_BSH, torch.arange(length)[None])
        query, key, value = (
            self._mapped(pair_BSH, f"midlayer.self_attn.{name}_proj").unflatten(-1, (-1, cos.size(-1))).transpose(1, 2)
            for name in "qkv"
        )
        query, key = (rotated(each, cos, sin) for each in (query, key))
        key, value = (each.repeat_interleave(heads // each.size(1), dim=1) for each in (key, value))
        scores = query @ key.transpose(-1, -2) / cos.size(-1) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        out = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        return self._mapped(out.transpose(1, 2).flatten(2), "midlayer.self_attn.o_proj")


def declare(directory: Path, version: str, features: list[int]) -> Path:
    """Let config.json declare the drafter; return the directory."""
    return drafter_reference.declare(directory, declared(version, features))


def add_drafter(directory: Path, version: str, features: list[int]) -> Path:
    """Add a random drafter to a model without heads; return the directory."""
    config = json.loads((directory / "config.json").read_text())
    return add_tensors(directory, random_tensors(config, len(features), version), declared(version, features))
