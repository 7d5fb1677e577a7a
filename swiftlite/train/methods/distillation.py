"""Compute the loss of `megatron gkd`: the divergence from a teacher, and the losses of MTP heads on the same tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from megatron.core.utils import get_attr_wrapped_model

from swiftlite.acceptance import statistics
from swiftlite.base.heads import Heads
from swiftlite.data.batch import Batch
from swiftlite.model.forward_step import ForwardStep
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.loss.balance import Balance
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.methods.distant_teacher import DistantTeacher
from swiftlite.train.methods.mtp_loss import count_labels, head_coefficients, target_weights
from swiftlite.train.methods.next_token import mean_over_labels
from swiftlite.train.methods.teacher import Teacher


@dataclass(frozen=True)
class DistillationObjective:
    """The mean divergence over the labels of a global batch, plus losses of the MTP heads on them.

    The divergence is defined in `distillation_loss`. The weights of labels and the losses of the heads are those of
    `NextTokenObjective`.

    Attributes:
        beta: weight of the teacher in the mixture of both distributions.
        states: the teacher's states for each micro-batch, see `prepare`.
        figures: further metrics of the global batch, such as the lengths of its completions.
    """

    teacher: Teacher | DistantTeacher
    beta: float
    heads: Heads
    mtp_loss_scaling_factor: float
    states: Sequence[torch.Tensor] = ()
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def nonfinite_hint(self) -> str:
        return "lower --lr or --mtp_loss_scaling_factor"

    @property
    def sums_shape(self) -> tuple[int, int]:
        return (1 + self.heads.drafts, 3)  # see `acceptance/statistics.py`

    def prepare(
        self, model: Sequence[torch.nn.Module], mesh: Mesh, batches: Sequence[Batch]
    ) -> "DistillationObjective":
        """Return the objective with the teacher's states for these micro-batches."""
        return replace(self, states=self.teacher.states(batches), figures=getattr(batches, "figures", {}))

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Count labels and tokens of the trunk and of each MTP depth: int64 [2, K]."""
        return count_labels(batches, self.heads)

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        """Return a forward step that gives the loss, the number of targets and the statistics of each micro-batch."""
        targets, tokens = counts.tolist()
        coefficients = head_coefficients(self.heads, self.mtp_loss_scaling_factor, targets[1:], targets[0])
        balance = Balance(tokens, divisor=targets[0])
        states = iter(self.states)

        def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
            batch = next(batches)
            teacher = None
            if get_attr_wrapped_model(model, "post_process"):  # the last stage computes all micro-batches in order
                teacher = self.teacher.target(next(states), self.beta)
            weights = target_weights(batch.loss_scale_KBS, coefficients)
            output = model(ModelInputs.of(batch, balance), Target.of(batch, teacher, weights=weights))
            return output, partial(mean_over_labels, batch=batch, coefficients=coefficients, mesh=mesh)

        return forward_step

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """Return `loss`, the mean divergence, the metrics of the heads, and `figures`."""
        return {**statistics.means(sums), **self.figures}
