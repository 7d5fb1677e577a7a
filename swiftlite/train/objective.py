"""The loss of a global batch: next-token loss plus weighted MTP losses, each a mean over its own valid targets.

For depth k of D, with N_k the number of valid targets of that depth in the whole global batch (N_0: the trunk's) and
a_k the weight of the depth (`Heads.weights`: 1 / D, unless one layer is unrolled over D steps):

    loss = sum(w * CE) / N_0 + mtp_loss_scaling_factor * sum_k( a_k * sum(w * CE_k) / N_k )

The counts are known before the first forward pass, so the loss depends neither on how the batch is cut into
micro-batches, nor on data parallelism, nor on padding; a depth with no target contributes exactly 0.
megatron-core divides all gradients by N_0 at the end of the step (`calculate_per_token_loss`), so what is summed here
is `sum(w * CE) + sum_k( c_k * sum(w * CE_k) )` with `c_k = mtp_loss_scaling_factor * a_k * N_0 / N_k`.

Shapes: K the trunk and each MTP depth, B batch, S sequence (this context-parallel rank's part in the pipeline).
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from swiftlite.acceptance.statistics import Statistics
from swiftlite.data.batch import Batch
from swiftlite.model.forward import forward
from swiftlite.model.gpt import Losses
from swiftlite.model.loss import IGNORE_INDEX
from swiftlite.runtime.mesh import Mesh


def count_targets(batches: Sequence[Batch], num_drafts: int) -> torch.Tensor:
    """Valid targets of the trunk and of each MTP depth in these batches: int64 [1 + num_drafts]."""
    counts = torch.zeros(1 + num_drafts, dtype=torch.int64)
    for batch in batches:
        counts += (batch.labels_KBS != IGNORE_INDEX).sum(dim=(1, 2)).cpu()
    return counts


def mtp_coefficients(counts: torch.Tensor, mtp_loss_scaling_factor: float, weights: Sequence[float]) -> list[float]:
    """c_k of each depth from the global counts of `count_targets` and `Heads.weights`."""
    main, *mtp = counts.tolist()
    return [
        mtp_loss_scaling_factor * weight * main / count if count else 0.0
        for weight, count in zip(weights, mtp, strict=True)
    ]


def total_loss(losses: Losses, loss_scale_KBS: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """`sum(w * CE) + sum_k( c_k * sum(w * CE_k) )` of one micro-batch, a scalar."""
    total = (losses.main.loss_BS * loss_scale_KBS[0]).sum()
    for coefficient, head, weight_BS in zip(coefficients, losses.mtp, loss_scale_KBS[1:], strict=True):
        total = total + coefficient * (head.loss_BS * weight_BS).sum()
    return total


def make_forward_step(coefficients: Sequence[float], mesh: Mesh) -> Callable:
    """The function that megatron-core's pipeline schedule calls for each micro-batch of a step."""

    def forward_step(batches: Iterator[Batch], model: torch.nn.Module):
        batch = next(batches)
        output = forward(model, batch)

        def loss_func(losses: Losses):
            num_tokens = (batch.labels_KBS[0] != IGNORE_INDEX).sum().int()
            total = total_loss(losses, batch.loss_scale_KBS, coefficients)
            return total, num_tokens, Statistics.of(losses, batch.loss_scale_KBS, mesh, batch.cu_seqlens)

        return output, loss_func

    return forward_step
