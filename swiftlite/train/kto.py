"""What `megatron dpo --loss_type kto` minimises: a loss of answers that are good or bad, one by one.

The distance between model and reference, KL, is estimated by answers behind other rows' questions. It is one number for
a global batch, so it is measured before the batch, without gradients.

Shapes: P answers of a micro-batch, K, B and S as in `objective.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from swiftlite.acceptance import statistics
from swiftlite.data.batch import Batch
from swiftlite.heads import Heads
from swiftlite.model.balance import Balance
from swiftlite.model.forward import forward
from swiftlite.model.gpt import Losses
from swiftlite.model.loss import IGNORE_INDEX
from swiftlite.model.pipeline import ForwardStep, run_pipeline
from swiftlite.plan.preference import Preference
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches import on_this_rank
from swiftlite.train.objective import add_heads, add_up
from swiftlite.train.preference import log_probabilities_of

SUMS = 8
"""All answers, their loss; of the good ones their number, rewards and log-probabilities; of the bad ones the same."""


def measure_kl(model: Sequence[torch.nn.Module], mesh: Mesh, mismatched: Sequence[Batch]) -> float:
    """The mean log(model / reference) of the mismatched answers of a global batch, at least 0; collective.

    Args:
        model: the chunks of this rank, in evaluation mode.
        mismatched: this rank's micro-batches of them, as many as on any other.
    """
    parts = run_pipeline(
        model,
        mesh,
        _ratios(mesh),
        [on_this_rank(mismatched, mesh) for _ in model],
        shapes=[batch.position_ids_BS.shape for batch in mismatched],
        forward_only=True,
    )
    total, number = add_up(parts, (2,), mesh).tolist()
    return max(total / number, 0.0) if number else 0.0


def _ratios(mesh: Mesh) -> Callable:
    """A forward step that gives the sum of the log-ratios of a micro-batch, and their number."""

    def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
        batch = next(batches)

        def loss_func(losses: Losses) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            reference_P = on_device(batch.reference_P2[:, 1], losses.main.loss_BS.device)
            log_p_P, _ = log_probabilities_of(losses.main.loss_BS, batch, mesh, len(reference_P))
            ratio_P = (log_p_P - reference_P).double()
            here = mesh.cp.rank() == 0  # context-parallel ranks have the same
            sums = torch.stack([ratio_P.sum(), torch.full_like(ratio_P, 1.0).sum()]) * here
            return ratio_P.sum(), torch.ones((), dtype=torch.int32, device=sums.device), sums

        return forward(model, batch), loss_func

    return forward_step


@dataclass(frozen=True)
class KtoObjective:
    """TRL's KTO loss, a mean over the answers of a global batch, plus the heads' losses on the good ones.

    Of an answer with r = log(model / reference), summed over its tokens:

        good    desirable_weight * (1 - sigmoid(beta * (r - kl)))
        bad     undesirable_weight * (1 - sigmoid(beta * (kl - r)))

    Attributes:
        kl: of the global batch, as `measure_kl` finds it.
    """

    preference: Preference
    heads: Heads
    mtp_loss_scaling_factor: float
    kl: float = 0.0

    @property
    def remedy(self) -> str:
        return "lower --lr or --mtp_loss_scaling_factor"

    @property
    def sums_shape(self) -> tuple[int]:
        return (SUMS + 3 * self.heads.drafts,)

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Valid targets of the trunk and of each MTP depth, all their tokens, and in each column the answers: int64
        [3, K]."""
        counts = torch.zeros(3, 1 + self.heads.drafts, dtype=torch.int64)
        for batch in batches:
            counts[0] += (batch.labels_KBS != IGNORE_INDEX).sum(dim=(1, 2)).cpu()
            counts[1] += (batch.sequence_KBS >= 0).sum(dim=(1, 2)).cpu()
            counts[2] += len(batch.desirable_P)
        return counts

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        """Each micro-batch's loss, its answers and its statistics."""
        targets, tokens, (num_answers, *_) = counts.tolist()
        coefficients = [
            self.mtp_loss_scaling_factor * weight * num_answers / count if count else 0.0
            for weight, count in zip(self.heads.weights, targets[1:], strict=True)
        ]
        balance = Balance(tokens, divisor=num_answers)
        counts_here = mesh.cp.rank() == 0  # context-parallel ranks have the same scores

        def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
            batch = next(batches)

            def loss_func(losses: Losses) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                loss_BS = losses.main.loss_BS
                log_p_P, _ = log_probabilities_of(loss_BS, batch, mesh, len(batch.desirable_P))
                ratio_P = log_p_P - on_device(batch.reference_P2[:, 0], loss_BS.device)
                desirable_P = on_device(batch.desirable_P, loss_BS.device)
                losses_P = self._losses(ratio_P, desirable_P)
                total = losses_P.sum()
                total = add_heads(total, losses, batch.loss_scale_KBS, coefficients)
                answers = torch.full((), len(losses_P) * counts_here, dtype=torch.int32, device=total.device)
                figures = self._figures(losses_P, ratio_P, log_p_P, desirable_P) * counts_here
                heads = statistics.sum_up(losses, batch.loss_scale_KBS, mesh, batch.cu_seqlens)[1:].flatten()
                return total, answers, torch.cat([figures, heads])

            return forward(model, batch, balance), loss_func

        return forward_step

    def _losses(self, ratio_P: torch.Tensor, desirable_P: torch.Tensor) -> torch.Tensor:
        preference = self.preference
        good_P = preference.desirable_weight * (1 - torch.sigmoid(preference.beta * (ratio_P - self.kl)))
        bad_P = preference.undesirable_weight * (1 - torch.sigmoid(preference.beta * (self.kl - ratio_P)))
        return torch.where(desirable_P, good_P, bad_P)

    @torch.no_grad()
    def _figures(
        self, losses_P: torch.Tensor, ratio_P: torch.Tensor, log_p_P: torch.Tensor, desirable_P: torch.Tensor
    ) -> torch.Tensor:
        """Float64 [SUMS]."""
        rows = [torch.full_like(losses_P, 1.0), losses_P]
        for is_kind_P in (desirable_P, ~desirable_P):
            rows += [is_kind_P, self.preference.beta * ratio_P * is_kind_P, log_p_P * is_kind_P]
        return torch.stack([row.double().sum() for row in rows])

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """By TRL's names: `loss`, `kl`, rewards and log-probabilities of good and bad answers (0 where there are none),
        and `rewards/margins` where there are both; and per depth `mtp_K_loss` and `mtp_K_acceptance`, on good ones."""
        number, loss, good, good_reward, good_logp, bad, bad_reward, bad_logp = sums[:SUMS].tolist()
        named = {
            "loss": loss / number if number else 0.0,
            "kl": self.kl,
            "rewards/chosen": good_reward / good if good else 0.0,
            "rewards/rejected": bad_reward / bad if bad else 0.0,
            "rewards/margins": 0.0,
            "logps/chosen": good_logp / good if good else 0.0,
            "logps/rejected": bad_logp / bad if bad else 0.0,
        }
        if good and bad:
            named["rewards/margins"] = named["rewards/chosen"] - named["rewards/rejected"]
        of_heads = sums[SUMS:].view(-1, 3)
        of_all = statistics.means(torch.cat([torch.zeros(1, 3, dtype=sums.dtype), of_heads]))
        del of_all["loss"]  # the trunk's, of which nothing was given
        return named | of_all
