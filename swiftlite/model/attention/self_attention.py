"""Self-attention whose queries and keys take the rotary embeddings that were computed once for all layers."""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention as McoreSelfAttention

from swiftlite.model.attention.rope import rotation


class SelfAttention(McoreSelfAttention):
    """megatron-core's, which would make cosines and sines of its own from angles, in every layer twice."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,  # None, or what CoreAttention takes
        *,
        rotary_pos_emb: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Outputs [S, B, H], and no bias.

        What the stock method hands on unseen to `get_query_key_value_tensors` are the states of cross attention, which
        there are none of here; rotary embeddings take their place.

        Args:
            rotary_pos_emb: `RotaryEmbedding`'s, of this rank's part of the row.
            kwargs: as megatron-core's layers call attention.
        """
        result: Any = super().forward(hidden_states, attention_mask, key_value_states=rotary_pos_emb, **kwargs)
        return result

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        rotary_pos_emb: torch.Tensor,  # key_value_states upstream, see `forward`
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Query [S, B, N, D], key and value [S, B, G, D] of the whole sequence."""
        made: Any = super().get_query_key_value_tensors(hidden_states, None, **kwargs)  # always split: see upstream
        query, key, *others = made  # the value, and the output gate where there is one
        rotate = rotation(self.config)
        return rotate(query, rotary_pos_emb), rotate(key, rotary_pos_emb), *others

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The result weighed by its gate, in the model's precision as in transformers and vLLM."""
        return x * gate.reshape(x.shape).sigmoid()
