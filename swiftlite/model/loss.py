"""Per-token losses and prediction over a vocabulary that may be split over tensor-parallel ranks.

Shapes: B batch, S sequence, N picked tokens, V vocabulary on this rank, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core import parallel_state, tensor_parallel

IGNORE_INDEX = -100
MAX_POSITIONS = 256
"""Positions whose trunk logits `distillation_loss` has in memory at one time, in float32 and in two copies."""


@dataclass(frozen=True)
class TokenLoss:
    """What one head (the trunk's, or one MTP depth's) says about each of its targets.

    Attributes:
        loss_BS: in nats, of `distillation_loss` with tv from 0 to 1; float32; 0 and without gradient where the target
            is ignored.
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
    return _laid_out(loss_N, prediction_N, picked_BS)


def distillation_loss(
    logits_NV: torch.Tensor,
    trunk_logits: Callable[[slice], torch.Tensor],
    kind: Literal["kl", "tv"],
    picked_BS: torch.Tensor,
) -> TokenLoss:
    """How far a head is from the trunk's own distribution of the same token; the head alone gets a gradient.

    "kl" is KL(trunk || head). "tv" is half of the sum of |head - trunk|: 1 minus the probability that rejection
    sampling accepts what the head drafts.

    Args:
        logits_NV: the head's; the memory of float32 ones is used for the gradient, so nothing may read them later.
        trunk_logits: the trunk's, [n, V], at some of the N positions; called for at most MAX_POSITIONS.
        picked_BS: as for `token_loss`.
    """
    with torch.no_grad():
        prediction_N = vocab_parallel_argmax(logits_NV)
    loss_N = _Distillation.apply(logits_NV, trunk_logits, kind)
    assert loss_N is not None
    return _laid_out(loss_N, prediction_N, picked_BS)


class _Distillation(torch.autograd.Function):
    """Keeps the gradient of each loss [N, V], where cross-entropy keeps probabilities; of the trunk, nothing."""

    @staticmethod
    def forward(ctx, logits_NV: torch.Tensor, trunk_logits: Callable[[slice], torch.Tensor], kind: str) -> torch.Tensor:
        gradient_NV, ctx.dtype = logits_NV.float(), logits_NV.dtype
        loss_N = gradient_NV.new_zeros(len(gradient_NV))
        for start in range(0, len(gradient_NV), MAX_POSITIONS):
            rows = slice(start, start + MAX_POSITIONS)
            loss_N[rows] = _distance_(gradient_NV[rows], trunk_logits(rows).float(), kind)
        ctx.save_for_backward(gradient_NV)
        return loss_N

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor):
        (gradient_NV,) = ctx.saved_tensors
        return gradient_NV.mul_(grad_outputs[0][:, None]).to(ctx.dtype), None, None


def _distance_(head_NV: torch.Tensor, trunk_NV: torch.Tensor, kind: str) -> torch.Tensor:
    """[N] from both's logits; puts the gradient in the place of the head's, and uses up the trunk's."""
    head, trunk = _log_softmax_(head_NV), _log_softmax_(trunk_NV)
    if kind == "kl":
        difference = trunk - head
        loss_N = _sum_over_vocabulary(trunk.exp_(), difference)
        head.exp_().sub_(trunk)
        return loss_N
    difference = trunk.exp_().neg_().add_(head.exp_())
    loss_N = _sum_over_ranks(torch.linalg.vector_norm(difference, 1, dim=-1)) / 2
    direction = difference.sign_().div_(2)
    head.mul_(direction.sub_(_sum_over_vocabulary(head, direction)[:, None]))
    return loss_N


def _log_softmax_(logits_NV: torch.Tensor) -> torch.Tensor:
    """In place, over the whole vocabulary."""
    largest_N = logits_NV.amax(dim=-1)
    group = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_reduce(largest_N, torch.distributed.ReduceOp.MAX, group=group)
    logits_NV.sub_(largest_N[:, None])
    return logits_NV.sub_(_sum_over_ranks(logits_NV.exp().sum(dim=-1)).log()[:, None])


def _sum_over_vocabulary(one_NV: torch.Tensor, other_NV: torch.Tensor) -> torch.Tensor:
    """[N], of the products, over all ranks."""
    return _sum_over_ranks(torch.bmm(one_NV[:, None], other_NV[:, :, None])[:, 0, 0])  # makes no [N, V], as vecdot does


def _sum_over_ranks(part_N: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(part_N, group=parallel_state.get_tensor_model_parallel_group())
    return part_N


def _laid_out(loss_N: torch.Tensor, prediction_N: torch.Tensor, picked_BS: torch.Tensor) -> TokenLoss:
    loss_BS = loss_N.new_zeros(picked_BS.shape).masked_scatter(picked_BS, loss_N)
    prediction_BS = prediction_N.new_full(picked_BS.shape, -1).masked_scatter(picked_BS, prediction_N)
    return TokenLoss(loss_BS, prediction_BS)
