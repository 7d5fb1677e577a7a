"""Define DFlash and DSpark in plain torch, with one mask over all blocks of a row, for the same comparisons as
`tests/engines/reference.py`.

It shares only the names of tensors in published files with swiftlite.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu

from tests.engines import drafter_reference
from tests.engines.drafter_reference import DrafterReference, add_tensors, load_trunk, rotated
from tests.tiny import embedded, logits_of

MASK = 127
"""The mask token: the last one of tiny models."""


def declared(features: list[int], layers: int = 1, rank: int = 0) -> dict[str, Any]:
    """Return what config.json declares for a drafter; it is DSpark with a rank of the Markov head."""
    drafter = {"kind": "dflash", "layers": 1, "feature_layers": features}
    if rank:
        drafter |= {"kind": "dspark", "markov_rank": rank}
    return {**drafter, "decoder_layers": layers, "mask_token_id": MASK}


def random_tensors(
    config: dict[str, Any], num_features: int, layers: int = 1, rank: int = 0, std: float = 0.2
) -> dict[str, torch.Tensor]:
    """Return a random drafter for a trunk with this config.json. Norms of keys are 1, as in trained drafters."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, num_features * hidden),
        "hidden_norm": (hidden,),
        "norm": (hidden,),
    }
    for layer in range(layers):
        own = {"self_attn.q_proj": (queries, hidden), "self_attn.o_proj": (hidden, queries)}
        own |= {f"self_attn.{name}_proj": (keys, hidden) for name in "kv"}
        own |= {f"self_attn.{name}_norm": (size,) for name in "qk"}
        own |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        own |= {"mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    if rank:
        shapes |= {f"markov_head.markov_w{number}": (config["vocab_size"], rank) for number in (1, 2)}
    tensors = {f"{name}.weight": (len(shape) == 1) + torch.randn(shape) * std for name, shape in shapes.items()}
    ones = {name: torch.ones(size) for name in tensors if name.endswith("k_norm.weight")}
    return tensors | ones


class DFlashReference(DrafterReference):
    """A trunk of transformers with a DFlash drafter, or a DSpark drafter if there are tensors of a Markov head.

    Args:
        tensors: tensors of the drafter, with the names in files.
        features: numbers of the decoder layers whose inputs it reads.
    """

    def __init__(self, trunk: Any, family: str, tensors: dict[str, torch.Tensor], features: list[int]):
        super().__init__(trunk, family, tensors, features)
        self.num_layers = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
        self.has_markov_head = "markov_head.markov_w1.weight" in tensors

    @classmethod
    def of(cls, trunk: Any, family: str, features: list[int], layers: int, rank: int = 0) -> "DFlashReference":
        """Return a trunk with a random drafter."""
        return cls(trunk, family, random_tensors(trunk.config.to_dict(), len(features), layers, rank), features)

    @classmethod
    def load(cls, directory: Path, family: str, depth: int = 1) -> "DFlashReference":
        """Read a checkpoint whose config.json declares the drafter."""
        trunk, tensors, drafter = load_trunk(directory, family)
        return cls(trunk, family, tensors, drafter["feature_layers"]).eval()

    def trunk_states(self, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the context, and the states after the final norm, each [B, S, H]."""
        seen, after = self.features_of(ids_BS)
        return self._normed(self._mapped(torch.cat(seen, dim=-1), "fc"), "hidden_norm"), after

    def block_states(self, context_BSH: torch.Tensor, anchor_BS: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """Return the states [B, S, num_drafts, H] of the drafts from all positions.

        Args:
            anchor_BS: the token after each position.
        """
        batch, length = anchor_BS.shape
        mask_BS = torch.full_like(anchor_BS, MASK)
        num_masks = num_drafts - self.has_markov_head
        states = embedded(self.trunk, torch.stack((anchor_BS, *[mask_BS] * num_masks), dim=-1).flatten(1))
        start, query = (each.flatten() for each in torch.meshgrid(torch.arange(length), torch.arange(num_masks + 1)))
        sees_context = torch.arange(length) <= start[:, None]
        allowed = torch.cat((sees_context, start == start[:, None]), dim=1)
        rotary = [
            self.trunk.model.rotary_emb(context_BSH, positions[None])
            for positions in (torch.arange(length), start + 1 + query)
        ]
        for layer in range(self.num_layers):
            states = self._layer(f"layers.{layer}", states, context_BSH, rotary, allowed)
        return self._normed(states, "norm").view(batch, length, num_masks + 1, -1)[:, :, -num_drafts:]

    def logits_after(self, states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return the logits of drafts from their states and from the tokens before them."""
        logits = logits_of(self.trunk, states)
        if not self.has_markov_head:
            return logits
        return logits + self._mapped(self.own["markov_head/markov_w1/weight"][before], "markov_head.markov_w2")

    def _layer(
        self, name: str, states: torch.Tensor, context: torch.Tensor, rotary: list[Any], allowed: torch.Tensor
    ) -> torch.Tensor:
        of_context, of_block = rotary
        inner = self._normed(states, f"{name}.input_layernorm")
        query = rotated(self._heads(inner, f"{name}.self_attn.q"), *of_block)
        keys = [
            rotated(self._heads(context, f"{name}.self_attn.k"), *of_context),
            rotated(self._heads(inner, f"{name}.self_attn.k"), *of_block),
        ]
        values = [self._heads(each, f"{name}.self_attn.v") for each in (context, inner)]
        per_key = self.trunk.config.num_attention_heads // keys[0].size(1)
        key, value = (torch.cat(each, dim=2).repeat_interleave(per_key, dim=1) for each in (keys, values))
        scores = (query @ key.transpose(-1, -2) / query.size(-1) ** 0.5).masked_fill(~allowed, -torch.inf)
        out = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        states = states + self._mapped(out, f"{name}.self_attn.o_proj")
        inner = self._normed(states, f"{name}.post_attention_layernorm")
        gated = silu(self._mapped(inner, f"{name}.mlp.gate_proj")) * self._mapped(inner, f"{name}.mlp.up_proj")
        return states + self._mapped(gated, f"{name}.mlp.down_proj")

    def _heads(self, states: torch.Tensor, name: str) -> torch.Tensor:
        """Return queries, keys or values [B, heads, S, D], the first two with their norms."""
        size = self.own["layers/0/self_attn/q_norm/weight"].numel()
        heads = self._mapped(states, f"{name}_proj").unflatten(-1, (-1, size)).transpose(1, 2)
        return heads if name.endswith("v") else self._normed(heads, f"{name}_norm")

    def trained_logits(
        self, rows_BS: torch.Tensor, hidden_BSH: torch.Tensor, num_drafts: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        states = self.block_states(hidden_BSH[:, :-1], rows_BS[:, 1:], num_drafts)
        pairs = []
        for draft in range(num_drafts):
            known = rows_BS.shape[1] - draft - 2
            logits = self.logits_after(states[:, :known, draft], rows_BS[:, draft + 1 : -1])
            pairs.append((logits, rows_BS[:, draft + 2 :]))
        return pairs

    @torch.no_grad()
    def draft_logits_at(
        self, row: list[int], lengths: Sequence[int], num_tokens: int, trunk_states_BSH: torch.Tensor
    ) -> torch.Tensor:
        longest = max(lengths)
        anchors = torch.tensor([row[1:longest]])
        states = self.block_states(trunk_states_BSH[:, : longest - 1], anchors, num_tokens)
        states, before = states[0, torch.tensor(lengths) - 2], torch.tensor([row[length - 1] for length in lengths])
        found = []
        for draft in range(num_tokens):
            logits = self.logits_after(states[:, draft], before)
            if self.draft_vocab:
                drafted = torch.tensor(self.draft_vocab)
                logits = torch.full_like(logits, -torch.inf).index_copy(-1, drafted, logits[..., drafted])
            before = logits.argmax(-1)
            found.append(logits)
        return torch.stack(found, dim=1)


def declare(directory: Path, features: list[int], layers: int = 1, rank: int = 0) -> Path:
    """Let config.json declare the drafter; return the directory."""
    return drafter_reference.declare(directory, declared(features, layers, rank))


def add_drafter(directory: Path, features: list[int], layers: int = 1, rank: int = 0) -> Path:
    """Add a random drafter to a model without heads; return the directory."""
    config = json.loads((directory / "config.json").read_text())
    tensors = random_tensors(config, len(features), layers, rank)
    return add_tensors(directory, tensors, declared(features, layers, rank))
