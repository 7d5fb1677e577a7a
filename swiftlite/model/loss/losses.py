"""Per-token losses and prediction over a vocabulary that may be split over tensor-parallel ranks.

Shapes: B batch, S sequence, N selected tokens, V vocabulary on this rank, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from swiftlite.runtime.device import on_device

IGNORE_INDEX = -100
Distance = Literal["kl", "tv", "nla", "lk_hybrid", "reverse_kl", "jsd"]
Group = dist.ProcessGroup | None
"""The tensor-parallel ranks that share the vocabulary; None if this rank has the whole vocabulary."""
MAX_POSITIONS = 256
"""Number of positions whose trunk logits `distillation_loss` holds at a time, in float32 and in two copies."""


@dataclass(frozen=True)
class Selected:
    """The positions of a micro-batch that have a label, row by row, as returned by `select`.

    Attributes:
        row_N, pos_N: indices of the positions in [B, S], int64.
        label_N: labels of the positions.
        shape: B and S.
    """

    row_N: torch.Tensor
    pos_N: torch.Tensor
    label_N: torch.Tensor
    shape: torch.Size


def select(labels_BS: torch.Tensor, device: torch.device) -> Selected:
    """Return the positions with a label, on the device.

    Args:
        labels_BS: labels, preferably on the host: the host needs the number of labels, and would wait for a GPU to get
            it.
    """
    row_N, pos_N = (labels_BS != IGNORE_INDEX).nonzero(as_tuple=True)
    stacked_3N = torch.stack([row_N, pos_N, labels_BS[row_N, pos_N]])  # one copy instead of three
    row_N, pos_N, label_N = on_device(stacked_3N, device)
    return Selected(row_N, pos_N, label_N, labels_BS.shape)


@dataclass(frozen=True)
class TokenLoss:
    """Losses and predictions of one head (the trunk's or one MTP depth's) for each target.

    Attributes:
        loss_BS: float32, in nats (tv: a probability); 0 without gradient where the target is ignored.
        prediction_BS: the head's most likely token, int64; -1 where the target is ignored.
        entropy_BS: entropy of the head's distribution, float32, in nats; 0 where the target is ignored. None if it was
            not requested.
        overlap_BS: overlap of the distributions of head and trunk, see `distillation_loss`; otherwise as `entropy_BS`.
        total: sum of the losses, multiplied by their weights, with gradient; then `loss_BS` has none. None unless the
            weights were known in the forward pass (`Target.weights`).
    """

    loss_BS: torch.Tensor
    prediction_BS: torch.Tensor
    entropy_BS: torch.Tensor | None = None
    overlap_BS: torch.Tensor | None = None
    total: torch.Tensor | None = None


def sharing(tp_group: dist.ProcessGroup) -> Group:
    """Return the ranks that share the vocabulary; None for a group of one."""
    if tp_group.size() == 1:
        return None
    return tp_group


def vocab_parallel_argmax(logits_NV: torch.Tensor, group: Group, tokens_V: torch.Tensor | None = None) -> torch.Tensor:
    """Return the most likely token [N] of logits whose vocabulary is split over a tensor-parallel group.

    Example with 4 tokens on each of 2 ranks: the largest logit of rank 0 is 1.5 for token 3. The largest logit of rank
    1 is 2.0 for its token 1, which is token 5 of the whole vocabulary. Both ranks receive (1.5, 3) and (2.0, 5), and
    choose 5.

    Args:
        tokens_V: the token of each logit on this rank; None: this rank's part of the whole vocabulary.
    """
    value_N, token_N = logits_NV.max(dim=-1)
    if tokens_V is not None:
        token_N = tokens_V[token_N]
    elif group is not None:
        token_N = token_N + group.rank() * logits_NV.size(-1)
    if group is None:
        return token_N
    size = group.size()
    values = [torch.empty_like(value_N) for _ in range(size)]
    tokens = [torch.empty_like(token_N) for _ in range(size)]
    dist.all_gather(values, value_N.contiguous(), group=group)
    dist.all_gather(tokens, token_N, group=group)
    # In a tie the first rank wins, as with argmax over the whole vocabulary.
    best_rank_N = torch.stack(values).argmax(dim=0)
    return torch.stack(tokens).gather(0, best_rank_N[None])[0]


def token_loss(
    logits_NV: torch.Tensor,
    selected: Selected,
    tp_group: dist.ProcessGroup,
    *,
    shown_NV: torch.Tensor | None = None,
    with_entropy: bool = False,
) -> TokenLoss:
    """Compute loss and prediction for the selected positions; return them as [B, S].

    Args:
        logits_NV: this rank's part of the logits at the selected positions.
        selected: the positions and their labels.
        shown_NV: the logits of which the largest is the prediction, if not those (`OutputMatrix.shown`).
        with_entropy: whether to compute the entropy as well.
    """
    entropy_N = None
    if shown_NV is None:
        shown_NV = logits_NV
    with torch.no_grad():
        prediction_N = vocab_parallel_argmax(shown_NV, sharing(tp_group))
        if with_entropy:
            parts = logits_NV.split(MAX_POSITIONS)
            entropy_N = torch.cat([entropy(part_NV, sharing(tp_group)) for part_NV in parts])
    # Shape [1, N] for megatron-core's [S, B]; the loss does not depend on the arrangement.
    # Last: it overwrites float32 logits (tensor_parallel/cross_entropy.py: `calculate_predicted_logits`).
    loss_N = tensor_parallel.vocab_parallel_cross_entropy(logits_NV.float()[None], selected.label_N[None])[0]
    return laid_out(loss_N, prediction_N, selected, entropy_N)


def entropy(logits_NV: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the entropy [N] of each position's distribution in nats, without overwriting the logits."""
    log_p_NV = _log_softmax_(logits_NV.to(torch.float32, copy=True), group)
    return -_sum_of_products(log_p_NV.exp(), log_p_NV, group)


def entropy_(logits_NV: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the entropy [N] of each position's distribution p in nats, and overwrite the logits with its gradient,
    -p * (log p + entropy)."""
    log_p_NV = _log_softmax_(logits_NV, group)
    p_NV = log_p_NV.exp()
    entropy_N = -_sum_of_products(p_NV, log_p_NV, group)
    log_p_NV.add_(entropy_N[:, None]).mul_(p_NV).neg_()
    return entropy_N


def distillation_loss(
    logits_NV: torch.Tensor,
    trunk_logits: Callable[[slice], torch.Tensor],
    kind: Distance,
    selected: Selected,
    tp_group: dist.ProcessGroup,
    tokens_V: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    shown_NV: torch.Tensor | None = None,
    with_overlap: bool = False,
) -> TokenLoss:
    """Compute the distance between the distributions of a head and the trunk for the same token. Only the head gets a
    gradient.

    "kl" is KL(trunk || head). Rejection sampling accepts a head's draft with a probability equal to their overlap, the
    sum of min(head, trunk): "tv" is 1 - overlap, "nla" is -log(overlap), and "lk_hybrid" is close to kl for a small
    overlap and close to tv for a large one. For a trunk with probabilities 0.75 and 0.25 for two tokens, and a head
    with 0.5 for each, the overlap is 0.75, "kl" is 0.75 ln 1.5 + 0.25 ln 0.5 = 0.13, "tv" 0.25, "nla" 0.29 and
    "lk_hybrid" 0.24.

    A student is compared with its teacher in the same way, by "kl", by "reverse_kl", which is KL(head || trunk), or by
    "jsd", the generalized Jensen-Shannon divergence `beta` KL(trunk || M) + (1 - `beta`) KL(head || M) with the mixture
    M = `beta` trunk + (1 - `beta`) head (`distance_of`; GKD, arXiv 2306.13649).

    Args:
        logits_NV: logits of the head. Logits in float32 are overwritten with the gradient, so they must not be read
            later.
        trunk_logits: returns the trunk's logits [n, V] at some of the N positions, at most MAX_POSITIONS per call.
        selected: the positions in the micro-batch that the logits belong to.
        tokens_V: the token of each logit, for a draft vocabulary; None for the whole vocabulary.
        beta: for "jsd", a scalar between 0 and 1.
        shown_NV: as for `token_loss`.
        with_overlap: whether to return the overlap as well, for the kinds of `overlap_of`.
    """
    if shown_NV is None:
        shown_NV = logits_NV
    with torch.no_grad():
        prediction_N = vocab_parallel_argmax(shown_NV, sharing(tp_group), tokens_V)
    overlap_N = logits_NV.new_empty(len(logits_NV), dtype=torch.float32) if with_overlap else None
    loss_N = _Distillation.apply(logits_NV, trunk_logits, kind, sharing(tp_group), beta, overlap_N)
    assert loss_N is not None
    return laid_out(loss_N, prediction_N, selected, overlap_N=overlap_N)


class _Distillation(torch.autograd.Function):
    """Computes the losses [N], and overwrites the head's logits with their gradient [N, V].

    No tensor of the trunk is stored for the backward pass.
    """

    @staticmethod
    def forward(
        ctx,
        logits_NV: torch.Tensor,
        trunk_logits: Callable[[slice], torch.Tensor],
        kind: Distance,
        group: Group,
        beta: torch.Tensor | None,
        overlap_N: torch.Tensor | None,
    ) -> torch.Tensor:
        # Float32 logits are not copied: their memory becomes that of the gradient.
        gradient_NV = logits_NV.float()
        loss_N = gradient_NV.new_zeros(len(gradient_NV))
        for start in range(0, len(gradient_NV), MAX_POSITIONS):
            rows = slice(start, start + MAX_POSITIONS)
            # In parts, because the distances need several temporary tensors of the logits' size.
            loss_N[rows] = compare_(gradient_NV[rows], trunk_logits(rows).float(), kind, group, beta)
            if overlap_N is not None:
                overlap_N[rows] = overlap_of(kind, loss_N[rows], gradient_NV[rows], group)
        ctx.dtype = logits_NV.dtype
        ctx.save_for_backward(gradient_NV)
        return loss_N

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor):
        (gradient_NV,) = ctx.saved_tensors
        return gradient_NV.mul_(grad_outputs[0][:, None]).to(ctx.dtype), None, None, None, None, None


def cross_entropy_(logits_NV: torch.Tensor, label_N: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the cross-entropy [N], and overwrite the logits with their gradient, softmax minus one-hot."""
    if group is None:
        return _whole_cross_entropy_(logits_NV, label_N)
    _below_largest_(logits_NV, group)
    here_N = label_N - group.rank() * logits_NV.size(-1)
    is_elsewhere_N = (here_N < 0) | (here_N >= logits_NV.size(-1))
    # Every rank gathers some logit; the sum over ranks keeps the one on the rank that has the label.
    here_N1 = here_N.masked_fill(is_elsewhere_N, 0)[:, None]
    logit_N = _sum_over_ranks(logits_NV.gather(1, here_N1)[:, 0].masked_fill(is_elsewhere_N, 0), group)
    sum_N = _sum_over_ranks(logits_NV.exp_().sum(dim=-1), group)
    # The one of the one-hot label, only on the rank that has the label.
    one_N = torch.where(is_elsewhere_N, 0.0, -1.0)
    logits_NV.div_(sum_N[:, None]).scatter_add_(1, here_N1, one_N[:, None])
    return sum_N.log() - logit_N


def _whole_cross_entropy_(logits_NV: torch.Tensor, label_N: torch.Tensor) -> torch.Tensor:
    """Compute `cross_entropy_` if this rank has the whole vocabulary."""
    _below_largest_(logits_NV, None)
    logit_N = logits_NV.gather(1, label_N[:, None])[:, 0]
    sum_N = logits_NV.exp_().sum(dim=-1)
    one_N1 = sum_N.new_full((), -1.0).expand(len(label_N), 1)
    logits_NV.div_(sum_N[:, None]).scatter_add_(1, label_N[:, None], one_N1)
    return sum_N.log() - logit_N


# All distances accept logits. They overwrite the head's logits with the gradient, and the trunk's with temporary
# values. h and t are the softmax probabilities of head and trunk; their overlap is the sum over the vocabulary of
# min(h, t).


def _kl_(head_NV: torch.Tensor, trunk_NV: torch.Tensor, group: Group) -> torch.Tensor:
    """Return [N], the sum over the vocabulary of t * (log t - log h). Its gradient is h - t."""
    loss_N, h, t = _kl_and_probabilities_(head_NV, trunk_NV, group)
    h.sub_(t)
    return loss_N


def _tv_(head_NV: torch.Tensor, trunk_NV: torch.Tensor, group: Group) -> torch.Tensor:
    """Return [N], half of the sum over the vocabulary of |h - t|, which is 1 - overlap."""
    h = _log_softmax_(head_NV, group).exp_()
    t = _log_softmax_(trunk_NV, group).exp_()
    # Before the gradient, which overwrites both.
    loss_N = _half_norm(h - t, group)
    _gradient_of_overlap_(h, t, group).neg_()
    return loss_N


def _nla_(head_NV: torch.Tensor, trunk_NV: torch.Tensor, group: Group) -> torch.Tensor:
    """Return [N], -log(overlap). Its gradient is the gradient of tv divided by the overlap.

    Unlike the gradient of tv, it does not vanish as the overlap approaches 0.
    """
    h = _log_softmax_(head_NV, group).exp_()
    t = _log_softmax_(trunk_NV, group).exp_()
    overlap_N = _sum_over_ranks(torch.minimum(h, t).sum(dim=-1), group)
    overlap_N.clamp_(min=torch.finfo(overlap_N.dtype).tiny)  # the overlap is 0 if probabilities underflow in float32
    _gradient_of_overlap_(h, t, group).div_(-overlap_N[:, None])
    return -overlap_N.log()


def _lk_hybrid_(head_NV: torch.Tensor, trunk_NV: torch.Tensor, group: Group) -> torch.Tensor:
    """Return [N], w * kl + (1 - w) * tv, where w = exp(-3 * overlap) is treated as a constant (arXiv 2602.23881)."""
    kl_N, h, t = _kl_and_probabilities_(head_NV, trunk_NV, group)
    difference = h - t
    tv_N = _half_norm(difference, group)
    w_N = torch.exp(-3 * (1 - tv_N))
    gradient_of_kl = difference.mul_(w_N[:, None])
    # tv is 1 - overlap, so (1 - w) * d(tv) is (w - 1) * d(overlap).
    _gradient_of_overlap_(h, t, group).mul_(w_N[:, None] - 1).add_(gradient_of_kl)
    return w_N * kl_N + (1 - w_N) * tv_N


def _reverse_kl_(head_NV: torch.Tensor, trunk_NV: torch.Tensor, group: Group) -> torch.Tensor:
    """Return [N], the sum over the vocabulary of h * (log h - log t)."""
    log_h = _log_softmax_(head_NV, group)
    log_t = _log_softmax_(trunk_NV, group)
    return _kl_from_head_(log_h, log_t.neg_().add_(log_h), group)


def _jsd_(head_NV: torch.Tensor, trunk_NV: torch.Tensor, group: Group, beta: torch.Tensor) -> torch.Tensor:
    """Return [N], beta * KL(t || m) + (1 - beta) * KL(h || m), where m = beta * t + (1 - beta) * h.

    The gradient with respect to h is (1 - beta) * (log h - log m), because the derivatives of m cancel out.
    """
    log_h = _log_softmax_(head_NV, group)
    log_t = _log_softmax_(trunk_NV, group)
    # In logarithms, so that m is not 0 where both probabilities underflow.
    log_m = torch.logaddexp(log_h + torch.log1p(-beta), log_t + beta.log())
    difference = log_t - log_m
    kl_of_trunk_N = _sum_of_products(log_t.exp_(), difference, group)
    kl_of_head_N = _kl_from_head_(log_h, log_m.neg_().add_(log_h), group)
    # `_kl_from_head_` has left the gradient of KL(h || m) in the memory of `log_h`.
    log_h.mul_(1 - beta)
    return beta * kl_of_trunk_N + (1 - beta) * kl_of_head_N


DISTANCES = {"kl": _kl_, "tv": _tv_, "nla": _nla_, "lk_hybrid": _lk_hybrid_, "reverse_kl": _reverse_kl_}


def compare_(
    head_NV: torch.Tensor, trunk_NV: torch.Tensor, kind: Distance, group: Group, beta: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the distances [N] of the logits, and overwrite the head's logits with the gradient.

    Args:
        beta: for "jsd", a scalar between 0 and 1.
    """
    if kind == "jsd":
        assert beta is not None
        return _jsd_(head_NV, trunk_NV, group, beta)
    return DISTANCES[kind](head_NV, trunk_NV, group)


def overlap_of(kind: Distance, loss_N: torch.Tensor, gradient_NV: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the overlap [N] of head and trunk from results of `compare_`, for `OVERLAP_LOSSES` (`plan/heads.py`)."""
    if kind == "tv":
        return 1 - loss_N
    if kind == "nla":
        return (-loss_N).exp()
    assert kind == "kl", kind
    # The gradient of kl is h - t, and half of its norm is tv.
    return 1 - _half_norm(gradient_NV, group)


def distance_of(beta: float) -> Distance:
    """Return the distance of the generalized Jensen-Shannon divergence, whose limits 0 and 1 are separate distances, as
    in TRL: the divergence itself is 0 for both.
    """
    if beta == 0:
        return "kl"
    return "reverse_kl" if beta == 1 else "jsd"


def _kl_from_head_(log_h: torch.Tensor, difference: torch.Tensor, group: Group) -> torch.Tensor:
    """Return [N], the sum over the vocabulary of h * difference, where difference is the logarithm of h divided by
    another distribution.

    Overwrite `log_h` with the gradient with respect to the head's logits; `difference` is overwritten as well.
    """
    h = log_h.exp_()
    kl_N = _sum_of_products(h, difference, group)
    h.mul_(difference.sub_(kl_N[:, None]))
    return kl_N


def _kl_and_probabilities_(
    head_NV: torch.Tensor, trunk_NV: torch.Tensor, group: Group
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return KL(trunk || head) [N], and overwrite the logits with the probabilities h and t."""
    log_h = _log_softmax_(head_NV, group)
    log_t = _log_softmax_(trunk_NV, group)
    difference = log_t - log_h
    t = log_t.exp_()
    kl_N = _sum_of_products(t, difference, group)
    return kl_N, log_h.exp_(), t


def _half_norm(difference_NV: torch.Tensor, group: Group) -> torch.Tensor:
    """Return [N], half of the sum of the absolute values over the vocabulary."""
    return _sum_over_ranks(torch.linalg.vector_norm(difference_NV, 1, dim=-1), group) / 2


def _gradient_of_overlap_(h: torch.Tensor, t: torch.Tensor, group: Group) -> torch.Tensor:
    """Overwrite h with the gradient with respect to the head's logits; t is overwritten as well.

    The gradient with respect to h is d = 1 where h < t, else 0. With respect to the logits it is h * (d - sum(h * d)).
    """
    d = t.gt_(h)
    mean_d_N1 = _sum_of_products(h, d, group)[:, None]
    return h.mul_(d.sub_(mean_d_N1))


def _log_softmax_(logits_NV: torch.Tensor, group: Group) -> torch.Tensor:
    """Compute the log-softmax in place, over the whole vocabulary."""
    _below_largest_(logits_NV, group)
    log_sum_N = _sum_over_ranks(logits_NV.exp().sum(dim=-1), group).log()
    return logits_NV.sub_(log_sum_N[:, None])


def _below_largest_(logits_NV: torch.Tensor, group: Group) -> None:
    """Subtract the maximum over the whole vocabulary in place, so that exponentials do not overflow."""
    largest_N = logits_NV.amax(dim=-1)
    if group is not None:
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
    logits_NV.sub_(largest_N[:, None])


def _sum_of_products(one_NV: torch.Tensor, other_NV: torch.Tensor, group: Group) -> torch.Tensor:
    """Return [N], the sum over the whole vocabulary of the products of the two tensors' elements."""
    if torch.compiler.is_compiling():
        products_N = (one_NV * other_NV).sum(dim=-1)  # fused when compiled
    else:
        products_N = torch.bmm(one_NV[:, None], other_NV[:, :, None])[:, 0, 0]  # no temporary [N, V], unlike vecdot
    return _sum_over_ranks(products_N, group)


def _sum_over_ranks(part_N: torch.Tensor, group: Group) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(part_N, group=group)
    return part_N


def laid_out(
    loss_N: torch.Tensor,
    prediction_N: torch.Tensor,
    selected: Selected,
    entropy_N: torch.Tensor | None = None,
    overlap_N: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> TokenLoss:
    """Scatter values at the selected positions back to [B, S]."""
    # Indices instead of a mask: with a mask, the host would wait for the size of the gradient.
    where = (selected.row_N, selected.pos_N)
    loss_BS = loss_N.new_zeros(selected.shape).index_put(where, loss_N)
    prediction_BS = prediction_N.new_full(selected.shape, -1).index_put(where, prediction_N)

    def optional(values_N: torch.Tensor | None) -> torch.Tensor | None:
        if values_N is None:
            return None
        return values_N.new_zeros(selected.shape).index_put(where, values_N)

    return TokenLoss(loss_BS, prediction_BS, optional(entropy_N), optional(overlap_N), total)
