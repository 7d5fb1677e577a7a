"""Compute the loss of `megatron gkd`: the divergence from a teacher, and the losses of MTP heads on the same tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from megatron.core.utils import get_attr_wrapped_model

from swiftlite.data.batch import Batch
from swiftlite.model.loss.chunked_loss import TeacherTarget
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.methods.distant_teacher import DistantTeacher
from swiftlite.train.methods.next_token import NextTokenObjective
from swiftlite.train.methods.teacher import Teacher


@dataclass(frozen=True, kw_only=True)
class DistillationObjective(NextTokenObjective):
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
    states: Sequence[torch.Tensor] = ()
    figures: Mapping[str, float] = field(default_factory=dict)

    def prepare(
        self, model: Sequence[torch.nn.Module], mesh: Mesh, batches: Sequence[Batch]
    ) -> "DistillationObjective":
        """Return the objective with the teacher's states for these micro-batches."""
        return replace(self, states=self.teacher.states(batches), figures=getattr(batches, "figures", {}))

    def _make_teacher(self) -> Callable[[torch.nn.Module], TeacherTarget | None]:
        states = iter(self.states)

        def teacher_of(model: torch.nn.Module) -> TeacherTarget | None:
            if not get_attr_wrapped_model(model, "post_process"):
                return None
            return self.teacher.target(next(states), self.beta)  # the last stage computes all micro-batches in order

        return teacher_of

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """Return `loss`, the mean divergence, the metrics of the heads, and `figures`."""
        return {**super().means(sums), **self.figures}
