"""`Objective`: what a run minimizes. The trainer is handed one; `train/methods` has those of the commands."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from swiftlite.data.batch import Batch
from swiftlite.model.forward_step import ForwardStep
from swiftlite.runtime.mesh import Mesh


class Objective(Protocol):
    """A loss over a global batch, and the statistics that are logged of it.

    A loss is a sum over targets (tokens, pairs of answers, whatever it is a mean over), divided by their number in the
    global batch. So it depends neither on how the batch is cut into micro-batches, nor on data parallelism, nor on
    padding. For each global batch the trainer calls, in this order:

        objective = objective.prepare(model, mesh, batches)        only of a `PreparedObjective`
        counts = objective.count_targets(batches)                  summed over data-parallel ranks
        forward_step = objective.make_forward_step(counts, mesh)   run over all micro-batches, forward and backward
        metrics = objective.means(sums)                            of what the micro-batches gave, summed over all ranks

    Whatever else it needs of a micro-batch, such as the log-probabilities of a reference model, is in `Batch.extras`.
    """

    @property
    def nonfinite_hint(self) -> str:
        """Hint, in terms of options, for a loss that is not finite."""
        ...

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Shape of the statistics of a micro-batch."""
        ...

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Count the targets in these whole micro-batches: int64 of any shape, right where the labels are (the last
        stage)."""
        ...

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        """Return what megatron-core's schedule calls for each micro-batch of a global batch.

        The function that it returns with the model's output gives three values: the micro-batch's sum to be
        minimized, a scalar; by how much it counts, an int32 scalar (megatron-core adds these up over micro-batches and
        ranks that hold other rows or tokens, and divides the gradients by the sum); its statistics, float64 of
        `sums_shape`, which add up over the same.

        Args:
            counts: `count_targets` of the whole global batch, the same on every rank.
            mesh: the ranks that hold the model.
        """
        ...

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """Return metrics by name, from the statistics of a global batch."""
        ...


@runtime_checkable
class PreparedObjective(Protocol):
    """An objective that depends on a global batch as a whole, such as on an estimate made from all of its answers."""

    def prepare(self, model: Sequence[torch.nn.Module], mesh: Mesh, batches: Sequence[Batch]) -> Objective:
        """Return the objective for this global batch; collective, called without gradients and in evaluation mode.

        Args:
            model: the chunks of this rank.
            batches: this rank's micro-batches of the global batch.
        """
        ...
