"""Implement DFlash and DSpark drafters (`families/dflash.py`) in plain torch on top of a transformers trunk.

Shapes: B batch (always 1), S positions, H hidden size, F features, N heads, G key-value heads, D head size, V
vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, apply_rotary_pos_emb

from swiftlite.bridge.rows import HfConfig
from swiftlite.engines.transformers.draft_generator import DraftSteps

_SETTINGS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("hidden_act", "attention_bias", "num_hidden_layers", "layer_types"),
)


class MarkovHead(nn.Module):
    """Adds a number to the logit of each token that depends on the token before it."""

    def __init__(self, vocab: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)

    def forward(self, before: torch.Tensor) -> torch.Tensor:
        """Return the numbers [B, V] for the tokens before, [B]."""
        return self.markov_w2(self.markov_w1(before))


class DFlashDrafter(nn.Module):
    """The drafter. Modules have the names of its files.

    Args:
        own_config: the drafter's own config.json, from `own_config` in `families/dflash.py`.
    """

    output_layer = None  # that of the trunk

    def __init__(self, own_config: HfConfig):
        super().__init__()
        config = Qwen3Config(**{key: own_config[key] for key in _SETTINGS})
        self.mask_token: int = own_config["dflash_config"]["mask_token_id"]
        num_features = len(own_config["dflash_config"]["target_layer_ids"])
        self.fc = nn.Linear(num_features * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers: Any = nn.ModuleList(Qwen3DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = None
        if rank := own_config.get("markov_rank"):
            self.markov_head = MarkovHead(own_config["vocab_size"], rank)

    def fused(self, features_BSH: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the context [B, S, H] from F features."""
        return self.hidden_norm(self.fc(torch.cat([*features_BSH], dim=-1)))

    def new_cache(self) -> DynamicCache:
        """Return an empty cache for the keys and values of the context in all layers."""
        return DynamicCache()

    def remember(self, context_BSH: torch.Tensor, cache: DynamicCache, rotary: Any) -> None:
        """Append keys and values of the context to the cache.

        Args:
            rotary: cosines and sines at the positions of the context.
        """
        for number, layer in enumerate(self.layers):
            _, key_BGSD, value_BGSD = _heads(layer.self_attn, context_BSH, rotary)
            cache.update(key_BGSD, value_BGSD, number)

    def forward(self, block_BSH: torch.Tensor, cache: DynamicCache, rotary: Any) -> torch.Tensor:
        """Return the states [B, S, H] of a block after the output norm.

        Args:
            block_BSH: embeddings of the anchor and the mask tokens.
            cache: keys and values of the context, which does not change.
            rotary: cosines and sines at the positions of the block.
        """
        for number, layer in enumerate(self.layers):
            attention = layer.self_attn
            query_BNSD, key_BGSD, value_BGSD = _heads(attention, layer.input_layernorm(block_BSH), rotary)
            # Read directly instead of updated: keys of the block belong to drafts, and the next round replaces them.
            context: Any = cache.layers[number]
            # Without a mask: all tokens of a block see each other and the whole context.
            out_BNSD = F.scaled_dot_product_attention(
                query_BNSD,
                torch.cat((context.keys, key_BGSD), dim=2),
                torch.cat((context.values, value_BGSD), dim=2),
                scale=attention.scaling,
                enable_gqa=True,
            )
            block_BSH = block_BSH + attention.o_proj(out_BNSD.transpose(1, 2).flatten(2))
            block_BSH = block_BSH + layer.mlp(layer.post_attention_layernorm(block_BSH))
        return self.norm(block_BSH)


def _heads(
    attention: Any, states_BSH: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [B, N, S, D], keys and values [B, G, S, D], with norms and rotary embeddings."""
    shape = (*states_BSH.shape[:2], -1, attention.head_dim)
    query_BNSD = attention.q_norm(attention.q_proj(states_BSH).view(shape)).transpose(1, 2)
    key_BGSD = attention.k_norm(attention.k_proj(states_BSH).view(shape)).transpose(1, 2)
    value_BGSD = attention.v_proj(states_BSH).view(shape).transpose(1, 2)
    return *apply_rotary_pos_emb(query_BNSD, key_BGSD, *rotary), value_BGSD


class DFlashSteps(DraftSteps):
    """Draft with a DFlash or DSpark drafter. For arguments, see `DraftSteps`."""

    def begin(self, ids: torch.Tensor, states: torch.Tensor) -> None:
        """Compute the states of all drafts of a round; `states` are the context (`DFlashDrafter.fused`)."""
        (drafter,), (cache,) = self._heads, self._caches
        anchor, begin = ids.shape[1] - 1, cache.get_seq_length()
        # The trunk has no state of the anchor, its newest token, and states after it are those of rejected drafts.
        context = states[:, : anchor - begin]
        drafter.remember(context, cache, self._rotary(context, begin))
        num_masks = self.num_tokens - (drafter.markov_head is not None)  # DSpark also drafts from the anchor's state
        masks = ids.new_full((1, num_masks), drafter.mask_token)
        embedding = self._embeddings(torch.cat((ids[:, -1:], masks), dim=1))
        self._states = drafter(embedding, cache, self._rotary(embedding, anchor))[:, -self.num_tokens :]

    def logits(self, number: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, V] of a draft."""
        (drafter,) = self._heads
        logits = self._output(drafter, self._states[:, number : number + 1])
        return logits if drafter.markov_head is None else logits + drafter.markov_head(ids[:, -1])

    def _rotary(self, states_BSH: torch.Tensor, start: int) -> Any:
        """Return cosines and sines at the positions of states; the first state is at position `start`."""
        positions = torch.arange(start, start + states_BSH.shape[1], device=states_BSH.device)[None]
        return self._decoder.rotary_emb(states_BSH, positions)
