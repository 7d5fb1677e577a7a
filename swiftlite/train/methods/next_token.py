"""The next-token loss of `megatron sft` and `megatron pt`.

Shapes: K the number of predictions (1 for the trunk, 1 for each MTP depth), B rows, S tokens of a row on this
context-parallel rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from swiftlite.acceptance import statistics
from swiftlite.data.batch import Batch
from swiftlite.model.forward_step import ForwardStep
from swiftlite.model.gpt import Losses
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.loss.balance import Balance
from swiftlite.model.loss.chunked_loss import TeacherTarget
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.model.trunk import COMPUTED, TrunkSource
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.methods.mtp_loss import HeadObjective, add_heads, count_labels, head_coefficients, target_weights
from swiftlite.train.phases import Run


@dataclass(frozen=True)
class NextTokenObjective(HeadObjective):
    """The next-token loss plus weighted MTP losses; each loss is a mean over its valid targets.

    Let N_k be the number of valid targets of depth k (of D) in the global batch, and N_0 that of the trunk. Let a_k be
    the weight of depth k (`Heads.weights`: 1 / D, unless one layer is unrolled over D steps), and w the weight of a
    target. The loss is

        loss = sum(w * CE) / N_0 + mtp_loss_scaling_factor * sum_k( a_k * sum(w * L_k) / N_k )

    L_k is the loss that --mtp_loss selects, by default the cross-entropy CE. Models with experts add the load-balancing
    losses of their routers (`model/loss/balance.py`), which are means over all tokens.

    A depth without targets contributes exactly 0. megatron-core divides all gradients by N_0 at the end of the step
    (`calculate_per_token_loss`), so this class sums `sum(w * CE) + sum_k( c_k * sum(w * L_k) )` with `c_k =
    mtp_loss_scaling_factor * a_k * N_0 / N_k`.
    """

    trunk: TrunkSource = COMPUTED

    @property
    def sums_shape(self) -> tuple[int, int]:
        return (1 + self.heads.drafts, 3)  # see `acceptance/statistics.py`

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Count valid targets and all tokens of the trunk and of each MTP depth: int64 [2, K]."""
        return count_labels(batches, self.heads)

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        """Return a forward step that returns, for a micro-batch, `total_loss`, the trunk's number of targets and the
        statistics."""
        targets, tokens = counts.tolist()
        # From the counts of the global batch: with those of the micro-batch, the loss would depend on how it is cut.
        coefficients = head_coefficients(self.heads, self.mtp_loss_scaling_factor, targets[1:], targets[0])
        balance = Balance(tokens, divisor=targets[0])
        teacher_of = self._make_teacher()

        def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
            batch = next(batches)
            weights = target_weights(batch.loss_scale_KBS, coefficients)
            target = Target.of(batch, teacher_of(model), weights=weights)
            output = model(ModelInputs.of(batch, balance), target, self.trunk.output(model, batch))
            return output, partial(mean_over_labels, batch=batch, coefficients=coefficients, mesh=mesh)

        return forward_step

    def _make_teacher(self) -> Callable[[torch.nn.Module], TeacherTarget | None]:
        """Return a function that returns, for each micro-batch in order, what the trunk learns in place of labels.

        It is called with the model of this stage.
        """
        return lambda model: None

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """Return `loss`, and `mtp_K_loss` and `mtp_K_acceptance` of each depth K; 0 without targets."""
        return statistics.means(sums)


def mean_over_labels(
    losses: Losses, *, batch: Batch, coefficients: Sequence[float], mesh: Mesh
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `total_loss`, the trunk's number of targets and the statistics of one micro-batch."""
    # Of this rank's part of the rows: `finalize_gradients` sums the numbers over data- and context-parallel ranks.
    num_targets = int((batch.labels_KBS[0] != IGNORE_INDEX).sum())
    sums = statistics.depth_sums(losses, batch.loss_scale_KBS, mesh, batch.cu_seqlens)
    # Integers, because the schedules add them to an int32 total in place (`total_num_tokens` of schedules.py).
    number = torch.full((), num_targets, dtype=torch.int32, device=sums.device)
    return total_loss(losses, batch.loss_scale_KBS, coefficients), number, sums


def total_loss(losses: Losses, loss_scale_KBS: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """Compute `sum(w * CE) + sum_k( c_k * sum(w * L_k) )` of one micro-batch, a scalar."""
    total = losses.main.total
    if total is None:
        total = (losses.main.loss_BS * loss_scale_KBS[0]).sum()
    return add_heads(total, losses, loss_scale_KBS, coefficients)


def next_token_objective(run: Run) -> NextTokenObjective:
    """Return the objective of a run."""
    return NextTokenObjective(run.plan.heads, run.args.mtp_loss_scaling_factor, run.trunk)
