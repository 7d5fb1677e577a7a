"""The MTP layer and the shift that gives each depth its inputs and targets.

Depth k (from 1) sees, at position s, the trunk's state there and the tokens s+1 .. s+k, and predicts token s+k+1.
Rotary positions are the trunk's (s, not s+k), as the engines use them when they draft.

Shapes: S sequence, B batch, H hidden size.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as McoreMultiTokenPredictionLayer


def shift_left(tensor_BS: torch.Tensor, fill: float) -> torch.Tensor:
    """What stands one token later: result[b, s] = tensor[b, s + 1], and `fill` at the end of the row."""
    shifted = tensor_BS.roll(-1, dims=1)
    shifted[:, -1] = fill
    return shifted


class MultiTokenPredictionLayer(McoreMultiTokenPredictionLayer):
    """megatron-core's layer, with the token ids shifted by `shift_left`.

    The stock layer shifts through `roll_tensor`, which also counts what is left with a float sum per depth, and needs
    a context-parallel group to be told that there is none.
    """

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding,
        hidden_states: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids [B, S] of the next depth, and their embeddings [S, B, H]; the last column is token 0, never a target."""
        input_ids = shift_left(input_ids, fill=0)
        return input_ids, position_ids, embedding(input_ids=input_ids, position_ids=position_ids), hidden_states
