"""The MTP layer: depth k (from 1) sees, at position s, the trunk's state there and the tokens s+1 .. s+k, and predicts
token s+k+1.

Rotary positions are the trunk's (s, not s+k), as the engines use them when they draft.

Shapes: S sequence, B batch, H hidden size.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as McoreMultiTokenPredictionLayer


class MultiTokenPredictionLayer(McoreMultiTokenPredictionLayer):
    """megatron-core's layer, given the token ids of its own depth.

    The stock layer shifts the ids itself, through `roll_tensor`, which across context-parallel ranks sends one message
    per packed sequence; here the whole row is shifted before it is cut (`data/batch.py`).
    """

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding,
        hidden_states: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The ids [B, S] as they came, and their embeddings [S, B, H]."""
        return input_ids, position_ids, embedding(input_ids=input_ids, position_ids=position_ids), hidden_states
