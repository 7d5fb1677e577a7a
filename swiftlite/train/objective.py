"""Define `Objective`, the loss that a trainer minimizes. `train/methods` implements the objectives of the commands."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from swiftlite.data.batch import Batch
from swiftlite.model.forward_step import ForwardStep
from swiftlite.runtime.mesh import Mesh


class Objective(Protocol):
    """A loss over a global batch, and statistics of this batch for the log.

    A loss is a sum over targets (such as tokens or pairs of answers), divided by the number of targets in the global
    batch. Therefore it does not depend on the micro-batch size, data parallelism or padding. For each global batch the
    trainer calls, in this order:

        objective = objective.prepare(model, mesh, batches)        only for a `PreparedObjective`
        counts = objective.count_targets(batches)                  summed over data-parallel ranks
        forward_step = objective.make_forward_step(counts, mesh)   run over all micro-batches, forward and backward
        metrics = objective.means(sums)                            statistics summed over micro-batches and ranks

    Additional inputs, such as the log-probabilities of a reference model, are in `Batch.extras`.
    """

    @property
    def nonfinite_hint(self) -> str:
        """Hint for the error about a non-finite loss: which options to change."""
        ...

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Shape of the statistics of a micro-batch."""
        ...

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Count the targets in these micro-batches, whose rows are not split over ranks yet; int64 of any shape.

        The result is used only from the last pipeline stage, because only this stage has labels.
        """
        ...

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        """Return the function that megatron-core's schedule calls for each micro-batch of a global batch.

        The returned function returns the model's output and a loss function. The loss function returns three values for
        the micro-batch:

        - the sum to be minimized, a scalar
        - the number of targets, an int32 scalar; megatron-core sums it over micro-batches and over data- and
          context-parallel ranks, and divides the gradients by the sum
        - the statistics, float64 with the shape `sums_shape`, summed in the same way. Of the last `num_maxima` entries,
          an optional attribute of the objective, the maximum is taken instead

        Args:
            counts: sum of `count_targets` over the global batch, the same on every rank.
            mesh: the ranks that hold the model.
        """
        ...

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """Return metrics by name, from the summed statistics of a global batch."""
        ...


@runtime_checkable
class PreparedObjective(Protocol):
    """An objective that needs a value of the whole global batch before the training step, such as KTO's KL estimate."""

    def prepare(self, model: Sequence[torch.nn.Module], mesh: Mesh, batches: Sequence[Batch]) -> Objective:
        """Return the objective for this global batch. Collective; called without gradients and in evaluation mode.

        Args:
            model: the chunks of this rank.
            batches: this rank's micro-batches of the global batch.
        """
        ...
