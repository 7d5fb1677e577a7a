"""Self-attention with rotary embeddings that are computed once for all layers."""

from copy import copy
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention as McoreSelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.model.attention.rope import rotation


class SelfAttention(McoreSelfAttention):
    """megatron-core's attention with precomputed cosines and sines.

    megatron-core's class computes cosines and sines twice in every layer, and all layers have the heads of one config.

    Args:
        config: config of the model.
        sizes: arguments of TransformerConfig with the number and size of this layer's heads, which replace those of
            `config`.
        is_rotary: whether queries and keys have rotary embeddings.
        rope: the channels of this layer in `rotary_pos_emb`, if layers have different rotary embeddings.
        rope_interleave: whether channels 2i and 2i + 1 are rotated together; otherwise i and i + R / 2.
        args, kwargs: arguments of megatron-core's class.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        sizes: dict[str, int],
        is_rotary: bool = True,
        rope: slice = slice(None),
        rope_interleave: bool = False,
        **kwargs: Any,
    ):
        super().__init__(_with_sizes(config, sizes), *args, **kwargs)
        self.is_rotary, self.rope, self.rope_interleave = is_rotary, rope, rope_interleave

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,  # as for CoreAttention
        *,
        rotary_pos_emb: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Return outputs [S, B, H], and None as the bias.

        megatron-core's method passes the states of cross attention unchanged to `get_query_key_value_tensors`. There is
        no cross attention here, so this argument is used for rotary embeddings.

        Args:
            rotary_pos_emb: output of `RotaryEmbedding` for this rank's part of the row.
            kwargs: further arguments of megatron-core's layers.
        """
        result: Any = super().forward(hidden_states, attention_mask, key_value_states=rotary_pos_emb, **kwargs)
        return result

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        rotary_pos_emb: torch.Tensor,  # key_value_states in megatron-core, see `forward`
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return query [S, B, N, D], and key and value [S, B, G, D] of the whole sequence."""
        made: Any = super().get_query_key_value_tensors(hidden_states, None, **kwargs)  # always split by default
        query, key, *others = made  # the value, and the output gate if there is one
        if not self.is_rotary:
            return query, key, *others
        rotary_pos_emb = rotary_pos_emb[..., self.rope]
        rotate = rotation(self.config, self.rope_interleave)
        return rotate(query, rotary_pos_emb), rotate(key, rotary_pos_emb), *others

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Multiply the attention output x by the sigmoid of the gate, in the model's precision, as in transformers and
        vLLM."""
        return x * gate.reshape(x.shape).sigmoid()


def _with_sizes(config: TransformerConfig, sizes: dict[str, int]) -> TransformerConfig:
    """Return the config with other sizes; the config itself if it already has them."""
    if all(getattr(config, name) == size for name, size in sizes.items()):
        return config
    own = copy(config)  # unlike `replace`, it does not derive other fields again
    for name, size in sizes.items():
        setattr(own, name, size)
    return own
