"""What a run minimises: an `Objective`, which the trainer is handed; and the one of `megatron sft`.

Shapes: K the trunk and each MTP depth, B batch, S sequence (this context-parallel rank's part in the pipeline).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from swiftlite.acceptance import statistics
from swiftlite.data.batch import Batch
from swiftlite.heads import Heads
from swiftlite.model.balance import Balance
from swiftlite.model.forward import forward
from swiftlite.model.gpt import Losses
from swiftlite.model.loss import IGNORE_INDEX
from swiftlite.model.pipeline import ForwardStep
from swiftlite.model.ranks import from_last_stage
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.trunk_states import TrunkStates


class Objective(Protocol):
    """A loss over a global batch, and the statistics that are logged of it.

    A loss is a sum over targets (tokens, pairs of answers, whatever it is a mean over), divided by their number in the
    global batch. So it depends neither on how the batch is cut into micro-batches, nor on data parallelism, nor on
    padding. For each global batch the trainer asks, in this order:

        counts = objective.count_targets(batches)                  summed over data-parallel ranks
        forward_step = objective.make_forward_step(counts, mesh)   run over all micro-batches, forward and backward
        metrics = objective.means(sums)                            of what the micro-batches gave, summed over all ranks

    Whatever else it needs of a micro-batch, such as the log-probabilities of a reference model, comes with the batches,
    which may be of a subclass of `Batch`.
    """

    @property
    def remedy(self) -> str:
        """What to try, in the words of the options, when the loss is no number any more."""
        ...

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Shape of the statistics of a micro-batch."""
        ...

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Targets in these whole micro-batches: int64 of any shape, right where the labels are (the last stage)."""
        ...

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        """What megatron-core's schedule calls for each micro-batch of a global batch.

        The function that it returns beside the model's output gives three values: the micro-batch's sum to be
        minimised, a scalar; by how much it counts, an int32 scalar (megatron-core adds these up over micro-batches and
        ranks that hold other rows or tokens, and divides the gradients by the sum); its statistics, float64 of
        `sums_shape`, which add up over the same.

        Args:
            counts: `count_targets` of the whole global batch, the same on every rank.
            mesh: the ranks that hold the model.
        """
        ...

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """Metrics by name, from the statistics of a global batch."""
        ...


def add_up(parts: Sequence[torch.Tensor], shape: tuple[int, ...], mesh: Mesh) -> torch.Tensor:
    """The statistics of all micro-batches of all ranks, on the CPU of every rank.

    Args:
        parts: those of this rank's micro-batches, on the last pipeline stage; elsewhere none.
        shape: of each.
    """
    sums = torch.zeros(shape, dtype=torch.float64, device=mesh.device.torch_device)
    for part in parts:
        sums += part
    dist.all_reduce(sums, group=mesh.dp_cp)
    return from_last_stage(sums, mesh).cpu()


@dataclass(frozen=True)
class NextTokenObjective:
    """The next-token loss plus weighted MTP losses, each a mean over its own valid targets.

    For depth k of D, with N_k the number of valid targets of that depth in the whole global batch (N_0: the trunk's)
    and a_k the weight of the depth (`Heads.weights`: 1 / D, unless one layer is unrolled over D steps):

        loss = sum(w * CE) / N_0 + mtp_loss_scaling_factor * sum_k( a_k * sum(w * CE_k) / N_k )

    To this routers of a mixture add their load-balancing losses (`model/balance.py`), means over all tokens.

    A depth with no target contributes exactly 0. megatron-core divides all gradients by N_0 at the end of the step
    (`calculate_per_token_loss`), so what is summed here is `sum(w * CE) + sum_k( c_k * sum(w * CE_k) )` with
    `c_k = mtp_loss_scaling_factor * a_k * N_0 / N_k`.
    """

    heads: Heads
    mtp_loss_scaling_factor: float
    trunk_states: TrunkStates | None = None
    """Where what a frozen trunk says is kept; None computes it each time."""

    @property
    def remedy(self) -> str:
        return "lower --lr or --mtp_loss_scaling_factor"

    @property
    def sums_shape(self) -> tuple[int, int]:
        return (1 + self.heads.drafts, 3)  # as `acceptance/statistics.py`

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Valid targets of the trunk and of each MTP depth in these batches, and all their tokens: int64 [2, K]."""
        counts = torch.zeros(2, 1 + self.heads.drafts, dtype=torch.int64)
        for batch in batches:
            counts[0] += (batch.labels_KBS != IGNORE_INDEX).sum(dim=(1, 2)).cpu()
            counts[1] += (batch.sequence_KBS >= 0).sum(dim=(1, 2)).cpu()
        return counts

    def coefficients(self, counts: torch.Tensor) -> list[float]:
        """c_k of each MTP depth, from the counts of the global batch."""
        main, *mtp = counts[0].tolist()
        return [
            self.mtp_loss_scaling_factor * weight * main / count if count else 0.0
            for weight, count in zip(self.heads.weights, mtp, strict=True)
        ]

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        """Each micro-batch's `total_loss`, the trunk's targets and its statistics."""
        coefficients = self.coefficients(counts)
        targets, tokens = counts.tolist()
        balance = Balance(tokens, divisor=targets[0])

        def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
            batch = next(batches)
            trunk = self.trunk_states.output_of(model, batch) if self.trunk_states else None
            output = forward(model, batch, balance, trunk)

            def loss_func(losses: Losses) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                num_targets = int((batch.labels_KBS[0] != IGNORE_INDEX).sum())
                sums = statistics.sum_up(losses, batch.loss_scale_KBS, mesh, batch.cu_seqlens)
                number = torch.full((), num_targets, dtype=torch.int32, device=sums.device)
                return total_loss(losses, batch.loss_scale_KBS, coefficients), number, sums

            return output, loss_func

        return forward_step

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """`loss`, and per depth `mtp_K_loss` and `mtp_K_acceptance`; 0 where there was no target."""
        return statistics.means(sums)


def total_loss(losses: Losses, loss_scale_KBS: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """`sum(w * CE) + sum_k( c_k * sum(w * CE_k) )` of one micro-batch, a scalar."""
    total = (losses.main.loss_BS * loss_scale_KBS[0]).sum()
    return add_heads(total, losses, loss_scale_KBS, coefficients)


def add_heads(
    total: torch.Tensor, losses: Losses, loss_scale_KBS: torch.Tensor, coefficients: Sequence[float]
) -> torch.Tensor:
    """The loss with those of the MTP heads, each times its coefficient."""
    for coefficient, head, weight_BS in zip(coefficients, losses.mtp, loss_scale_KBS[1:], strict=True):
        total = total + coefficient * (head.loss_BS * weight_BS).sum()
    return total
