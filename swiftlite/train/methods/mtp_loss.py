"""Compute the losses of the MTP heads, which every objective adds to its own loss.

Shapes: K the number of predictions (1 for the trunk, 1 for each MTP depth), B rows, S tokens of a row on this
context-parallel rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from swiftlite.acceptance import statistics
from swiftlite.base.heads import Heads
from swiftlite.data.batch import Batch
from swiftlite.model.gpt import Losses
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.runtime.mesh import Mesh


@dataclass(frozen=True)
class HeadObjective:
    """The parts of `Objective` that losses share to which those of MTP heads are added."""

    heads: Heads
    mtp_loss_scaling_factor: float

    nonfinite_hint = "lower --lr or --mtp_loss_scaling_factor"
    num_sums: ClassVar[int]
    """Number of statistics of a micro-batch without those of the heads."""

    @property
    def sums_shape(self) -> tuple[int, ...]:
        return (self.num_sums + 3 * self.heads.drafts,)


def count_labels(batches: Sequence[Batch], heads: Heads) -> torch.Tensor:
    """Count valid targets and all tokens of the trunk and of each MTP depth in these batches: int64 [2, K]."""
    counts = torch.zeros(2, 1 + heads.drafts, dtype=torch.int64)
    for batch in batches:
        counts[0] += (batch.labels_KBS != IGNORE_INDEX).sum(dim=(1, 2)).cpu()
        counts[1] += (batch.sequence_KBS >= 0).sum(dim=(1, 2)).cpu()
    return counts


def count_labels_and_sequences(batches: Sequence[Batch], heads: Heads) -> torch.Tensor:
    """Count as `count_labels`, and also sequences: int64 [3, K], the number of sequences in every column."""
    sequences = torch.full((1, 1 + heads.drafts), sum(batch.num_sequences for batch in batches))
    return torch.cat([count_labels(batches, heads), sequences])


def head_coefficients(
    heads: Heads, mtp_loss_scaling_factor: float, num_targets: Sequence[int], divisor: int
) -> list[float]:
    """Return the coefficient with which the summed loss of each MTP depth is added. Gradients are later divided by
    `divisor`.

    The coefficients make the loss of each depth a mean over its targets. A depth without targets has the coefficient 0.
    With joint weights, the loss is one of chains of drafts, and a mean over them: over the targets of the first depth.

    Example: for one depth with weight 1, scaling factor 0.3 and 50 targets, and gradients divided by 200 tokens, the
    coefficient is 0.3 * 200 / 50 = 1.2.

    Args:
        num_targets: number of targets of each MTP depth in the global batch.
        divisor: number of targets (tokens or pairs) of the objective's own loss in the global batch.
    """
    if heads.has_joint_weights:
        # Every chain starts at a target of the first depth, also one that ends before the last depth.
        num_targets = [num_targets[0]] * heads.drafts
    coefficients = []
    for weight, count in zip(heads.weights, num_targets, strict=True):
        coefficients.append(mean_of(mtp_loss_scaling_factor * weight * divisor, count))
    return coefficients


def mean_of(total: float, number: float) -> float:
    """Return the mean of `number` values from their sum; 0 without values."""
    if not number:
        return 0.0
    return total / number


def target_weights(loss_scale_KBS: torch.Tensor, coefficients: Sequence[float]) -> list[torch.Tensor]:
    """Return `Target.weights` of a loss that is `sum(w * L)` of the trunk and `add_heads`."""
    return [c * weight_BS for c, weight_BS in zip((1.0, *coefficients), loss_scale_KBS, strict=True)]


def add_heads(
    total: torch.Tensor, losses: Losses, loss_scale_KBS: torch.Tensor, coefficients: Sequence[float]
) -> torch.Tensor:
    """Return `total` plus the losses of the MTP heads, each multiplied by its coefficient."""
    weights: Sequence[torch.Tensor] = list(loss_scale_KBS[1:])
    overlaps = [head.overlap_BS for head in losses.mtp if head.overlap_BS is not None]
    if overlaps:  # joint weights
        of_chains = chain_weights(overlaps)
        weights = [weight_BS * of_chain_BS for weight_BS, of_chain_BS in zip(weights, of_chains, strict=True)]
    for coefficient, head, weight_BS in zip(coefficients, losses.mtp, weights, strict=True):
        summed = head.total
        if summed is None:
            summed = coefficient * (head.loss_BS * weight_BS).sum()
        total = total + summed
    return total


def chain_weights(overlaps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the weight of each draft in the loss of the chain of K drafts that starts at a position.

    Rejection sampling accepts draft j with a probability equal to its overlap a_j, if it accepts the drafts before it.
    The expected number of accepted drafts is sum_j( a_1 ... a_j ), and the loss of the chain is 1 minus this sum / K.
    Its gradient is that of sum_m( W_m * (1 - a_m) ) / K, where the weight counts as a constant:

        W_m = a_1 ... a_{m-1} * (1 + a_{m+1} * (1 + a_{m+2} * (1 + ...)))

    The chain ends before the first ignored target, whose overlap is 0: an engine does not draft beyond it. For overlaps
    of 0.8, 0.5 and 0 the weights are 1 + 0.5 = 1.5, 0.8, and 0.4 for a loss that is 0.

    Args:
        overlaps: overlap of head and trunk for each draft, [B, S]; 0 where the target is ignored.
    """
    weights = []
    # From the last draft to the first: the factor 1 + a_{m+1} * (1 + ...) of each.
    after_BS = torch.ones_like(overlaps[0])
    for overlap_BS in reversed(overlaps):
        weights.insert(0, after_BS)
        after_BS = 1 + overlap_BS * after_BS
    # From the first to the last: the factor a_1 ... a_{m-1}, with which a draft is reached.
    reached_BS = torch.ones_like(overlaps[0])
    for draft, overlap_BS in enumerate(overlaps):
        weights[draft] = reached_BS * weights[draft]
        reached_BS = reached_BS * overlap_BS
    return weights


def head_sums(losses: Losses, batch: Batch, mesh: Mesh) -> torch.Tensor:
    """Return the statistics of the heads in one micro-batch: float64 [3 * drafts], see `acceptance/statistics.py`."""
    return statistics.depth_sums(losses, batch.loss_scale_KBS, mesh, batch.cu_seqlens)[1:].flatten()


def head_means(sums: torch.Tensor) -> dict[str, float]:
    """Return `mtp_K_loss` and `mtp_K_acceptance` for each depth, from the summed `head_sums`."""
    without_trunk = torch.zeros(1, 3, dtype=sums.dtype)
    named = statistics.means(torch.cat([without_trunk, sums.view(-1, 3)]))
    del named["loss"]  # the trunk's loss
    return named
