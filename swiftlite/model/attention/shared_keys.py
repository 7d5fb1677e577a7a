"""Attention to keys and values that another layer has computed.

Shapes: S sequence, B batch, H size of the states, N query heads and G key-value heads of a tensor-parallel rank, D size
of a head. In attention, S is the sequence of all sequence-parallel ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch

from swiftlite.model.attention.cache import Cache
from swiftlite.model.attention.self_attention import SelfAttention
from swiftlite.model.shared_states import SharedStates


@dataclass(frozen=True)
class Read:
    """Hold what the queries of a layer see.

    megatron-core's layers pass this object to attention in the argument for a mask.

    Attributes:
        key_SBGD, value_SBGD: keys and values of another layer, on this context-parallel rank.
        cache: the cache of the rows in decoding; None in training.
    """

    key_SBGD: torch.Tensor
    value_SBGD: torch.Tensor
    cache: Cache | None


class KeepingAttention(SelfAttention):
    """`SelfAttention` whose keys and values other layers can read (`SharedStates.keep`)."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *, rotary_pos_emb: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Return outputs [S, B, H], and None as the bias.

        Args:
            attention_mask: `SharedStates`, or as for `SelfAttention.forward`, like the other arguments.
        """
        if isinstance(attention_mask, SharedStates):
            # Together, because only rotary embeddings reach `get_query_key_value_tensors` (`SelfAttention.forward`).
            rotary_pos_emb, attention_mask = (rotary_pos_emb, attention_mask), attention_mask.cache
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb, **kwargs)

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, rotary_pos_emb: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the result of `SelfAttention`.

        Args:
            rotary_pos_emb: rotary embedding, alone or with the `SharedStates` (see `forward`).
        """
        if isinstance(rotary_pos_emb, torch.Tensor):
            return super().get_query_key_value_tensors(hidden_states, rotary_pos_emb, **kwargs)
        rotary_emb, shared = rotary_pos_emb
        made = super().get_query_key_value_tensors(hidden_states, rotary_emb, **kwargs)
        shared.keep(self.layer_number - 1, made[1], made[2])
        return made


class ReadingAttention(SelfAttention):
    """`SelfAttention` that computes only queries; `linear_qkv` has no other outputs.

    Args:
        args, kwargs: arguments of `SelfAttention`.
        key_layer: number of the layer (from 0) in `SharedStates.keys` whose keys and values are read; None if the layer
            gets a `Read`.
    """

    def __init__(self, *args: Any, key_layer: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.key_layer = key_layer

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *, rotary_pos_emb: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Return outputs [S, B, H], and None as the bias.

        Args:
            attention_mask: the keys and values, passed in place of a mask. Other arguments are those of
                `SelfAttention.forward`.
        """
        read = attention_mask
        if isinstance(read, SharedStates):
            assert self.key_layer is not None
            read = Read(*read.keys[self.key_layer], read.cache)
        # Together, because only rotary embeddings reach `get_query_key_value_tensors` (`SelfAttention.forward`).
        both: Any = (rotary_pos_emb, read)
        return super().forward(hidden_states, read.cache, rotary_pos_emb=both, **kwargs)

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, rotary_pos_emb: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return query [S, B, N, D], and the key and the value [S, B, G, D] that it sees.

        Args:
            rotary_pos_emb: rotary embedding of queries, and the `Read` (see `forward`).
        """
        rotary_emb, read = rotary_pos_emb
        linear_q: Any = self.linear_qkv
        q_norm: Any = self.q_layernorm
        query = q_norm(linear_q(hidden_states)[0].unflatten(-1, (-1, self.query_size)))
        return self._rotated(query, q_norm, rotary_emb[..., self.rope]), read.key_SBGD, read.value_SBGD
