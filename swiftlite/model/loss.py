"""Per-token cross-entropy and prediction over a vocabulary that may be split over tensor-parallel ranks.

Shapes: B batch, S sequence, N picked tokens, V vocabulary on this rank, H hidden size.
"""

from dataclasses import dataclass

import torch
from megatron.core import parallel_state, tensor_parallel

IGNORE_INDEX = -100


@dataclass(frozen=True)
class TokenLoss:
    """What one head (the trunk's, or one MTP depth's) says about each of its targets.

    Attributes:
        loss_BS: cross-entropy in nats, float32; 0 and without gradient where the target is ignored.
        prediction_BS: the head's most likely token there, int64; -1 where the target is ignored.
    """

    loss_BS: torch.Tensor
    prediction_BS: torch.Tensor


def vocab_parallel_argmax(logits_NV: torch.Tensor) -> torch.Tensor:
    """The most likely token [N] of logits whose vocabulary is split over the tensor-parallel group."""
    value_N, token_N = logits_NV.max(dim=-1)
    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1:
        return token_N
    token_N = token_N + parallel_state.get_tensor_model_parallel_rank() * logits_NV.size(-1)
    group = parallel_state.get_tensor_model_parallel_group()
    values = [torch.empty_like(value_N) for _ in range(size)]
    tokens = [torch.empty_like(token_N) for _ in range(size)]
    torch.distributed.all_gather(values, value_N.contiguous(), group=group)
    torch.distributed.all_gather(tokens, token_N, group=group)
    # The first rank wins a tie, as argmax over the whole vocabulary would have it.
    best_rank_N = torch.stack(values).argmax(dim=0)
    return torch.stack(tokens).gather(0, best_rank_N[None])[0]


def token_loss(logits_NV: torch.Tensor, targets_N: torch.Tensor, picked_BS: torch.Tensor) -> TokenLoss:
    """Loss and prediction for the picked positions, laid out as [B, S] again.

    Args:
        logits_NV: this rank's part of the logits at the picked positions, in row order.
        targets_N: the token each must predict.
        picked_BS: which positions those are.
    """
    with torch.no_grad():
        prediction_N = vocab_parallel_argmax(logits_NV)
    # The [1, N] shape is megatron-core's [S, B]; the loss does not care which is which.
    loss_N = tensor_parallel.vocab_parallel_cross_entropy(logits_NV.float()[None], targets_N[None])[0]
    loss_BS = loss_N.new_zeros(picked_BS.shape).masked_scatter(picked_BS, loss_N)
    prediction_BS = prediction_N.new_full(picked_BS.shape, -1).masked_scatter(picked_BS, prediction_N)
    return TokenLoss(loss_BS, prediction_BS)
