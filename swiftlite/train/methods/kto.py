"""Compute KTO (arXiv 2402.01306), a loss over single answers labeled good or bad (`megatron dpo --loss_type kto`).

The loss requires the KL divergence between the model and the reference model. It is estimated from mismatched answers:
each prompt is paired with the answer of another row, its companion. The estimate is one value per global batch, and is
therefore computed before the training step, without gradients.

Shapes: P answers of a micro-batch, K the number of predictions (1 for the trunk, 1 for each MTP depth), B rows, S
tokens of a row on this context-parallel rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from swiftlite.args.commands import DpoArgs
from swiftlite.data.batch import Batch, Extra
from swiftlite.data.changed_samples import ChangedSamples, JoinedSamples
from swiftlite.data.dataset import Data
from swiftlite.data.encoder import Encoder
from swiftlite.data.rows.rated import mismatch, parse_rated
from swiftlite.data.sample import Sample, digest
from swiftlite.model.forward import forward_step_of, run_batches
from swiftlite.model.forward_step import ForwardStep
from swiftlite.model.gpt import Losses
from swiftlite.model.loss.balance import Balance
from swiftlite.model.ranks import all_reduce_sum
from swiftlite.plan.preference import Preference, preference_of
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import MicroBatches
from swiftlite.train.methods.conversations import load_data, make_conversation_encoder
from swiftlite.train.methods.mtp_loss import (
    HeadObjective,
    add_heads,
    count_labels_and_sequences,
    head_coefficients,
    head_means,
    head_sums,
    mean_of,
)
from swiftlite.train.methods.preference import REFERENCE, log_probabilities_of
from swiftlite.train.methods.reference import score_with_reference
from swiftlite.train.methods.training import Training

DESIRABLE = Extra("desirable", torch.bool)
"""Whether an answer is labeled good."""
SUMS = 8
"""Number of sums per micro-batch. There are two over all answers (their number and their loss), and three each over
good and over bad answers (their number, rewards and log-probabilities).
"""


def measure_kl(model: Sequence[torch.nn.Module], mesh: Mesh, companions: Sequence[Batch]) -> float:
    """Return the mean of log(model / reference) over the mismatched answers of a global batch, at least 0. Collective.

    Args:
        model: the chunks of this rank, in evaluation mode.
        companions: this rank's micro-batches of mismatched answers; the same number of micro-batches on every rank.
    """

    def sum_ratios(losses: Losses, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_p_P, _ = log_probabilities_of(losses.main.loss_BS, batch, mesh)
        ratio_P = (log_p_P - batch.extras[REFERENCE.name]).double()
        here = mesh.cp.rank() == 0  # context-parallel ranks have the same scores
        sums = torch.stack([ratio_P.sum(), torch.full_like(ratio_P, 1.0).sum()]) * here
        return ratio_P.sum(), torch.ones((), dtype=torch.int32, device=sums.device), sums

    # Before the forward passes of the step: the loss of each answer depends on the KL of the whole global batch.
    parts = run_batches(model, mesh, companions, forward_step_of(sum_ratios), forward_only=True)
    total, number = all_reduce_sum(parts, (2,), mesh).tolist()
    # As in TRL: a divergence is not negative, but its estimate can be.
    return max(mean_of(total, number), 0.0)


@dataclass(frozen=True)
class KtoObjective(HeadObjective):
    """TRL's KTO loss, a mean over the answers of a global batch, plus the losses of the MTP heads on the good answers.

    Let r be log(model / reference), summed over the tokens of an answer. The loss of the answer is

        good    desirable_weight * (1 - sigmoid(beta * (r - kl)))
        bad     undesirable_weight * (1 - sigmoid(beta * (kl - r)))

    Attributes:
        kl: estimated KL divergence of the global batch, result of `measure_kl`.
    """

    preference: Preference
    kl: float = 0.0
    num_sums = SUMS

    def prepare(self, model: Sequence[torch.nn.Module], mesh: Mesh, batches: Sequence[Batch]) -> "KtoObjective":
        """Return the objective with the KL of this global batch; see `PreparedObjective`."""
        assert isinstance(batches, MicroBatches)  # the rules reject --streaming
        return replace(self, kl=measure_kl(model, mesh, batches.companions))

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Count valid targets, all tokens and answers, for the trunk and each MTP depth: int64 [3, K]."""
        return count_labels_and_sequences(batches, self.heads)

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        """Return a forward step that gives the loss, the number of answers and the statistics of each micro-batch."""
        targets, tokens, (num_answers, *_) = counts.tolist()
        coefficients = head_coefficients(self.heads, self.mtp_loss_scaling_factor, targets[1:], num_answers)
        balance = Balance(tokens, divisor=num_answers)
        counts_here = mesh.cp.rank() == 0  # context-parallel ranks have the same scores

        def loss_of(losses: Losses, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            log_p_P, _ = log_probabilities_of(losses.main.loss_BS, batch, mesh)
            ratio_P = log_p_P - batch.extras[REFERENCE.name]
            desirable_P = batch.extras[DESIRABLE.name]
            losses_P = self._losses(ratio_P, desirable_P)
            total = losses_P.sum()
            total = add_heads(total, losses, batch.loss_scale_KBS, coefficients)
            answers = torch.full((), len(losses_P) * counts_here, dtype=torch.int32, device=total.device)
            figures = self._figures(losses_P, ratio_P, log_p_P, desirable_P) * counts_here
            heads = head_sums(losses, batch, mesh)
            return total, answers, torch.cat([figures, heads])

        return forward_step_of(loss_of, balance)

    def _losses(self, ratio_P: torch.Tensor, desirable_P: torch.Tensor) -> torch.Tensor:
        preference = self.preference
        good_P = preference.desirable_weight * (1 - torch.sigmoid(preference.beta * (ratio_P - self.kl)))
        bad_P = preference.undesirable_weight * (1 - torch.sigmoid(preference.beta * (self.kl - ratio_P)))
        return torch.where(desirable_P, good_P, bad_P)

    @torch.no_grad()
    def _figures(
        self, losses_P: torch.Tensor, ratio_P: torch.Tensor, log_p_P: torch.Tensor, desirable_P: torch.Tensor
    ) -> torch.Tensor:
        """Return the sums of a micro-batch, float64 [SUMS]."""
        rows = [torch.full_like(losses_P, 1.0), losses_P]
        for is_kind_P in (desirable_P, ~desirable_P):
            rows += [is_kind_P, self.preference.beta * ratio_P * is_kind_P, log_p_P * is_kind_P]
        return torch.stack([row.double().sum() for row in rows])

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """Return metrics by TRL's names, and `mtp_K_loss` and `mtp_K_acceptance` of each depth K on good answers.

        TRL's metrics are `loss`, `kl`, rewards and log-probabilities of good and of bad answers (0 without answers),
        and `rewards/margins` if the batch has both kinds.
        """
        number, loss, good, good_reward, good_logp, bad, bad_reward, bad_logp = sums[:SUMS].tolist()
        named = {
            "loss": mean_of(loss, number),
            "kl": self.kl,
            "rewards/chosen": mean_of(good_reward, good),
            "rewards/rejected": mean_of(bad_reward, bad),
            "rewards/margins": 0.0,
            "logps/chosen": mean_of(good_logp, good),
            "logps/rejected": mean_of(bad_logp, bad),
        }
        if good and bad:
            named["rewards/margins"] = named["rewards/chosen"] - named["rewards/rejected"]
        return named | head_means(sums[SUMS:])


def load_rated(args: DpoArgs, encoder: Encoder, vocab_size: int) -> Data:
    """Read training and held-out rows. The companion of each sample is its prompt with the answer of another row.

    Raises:
        UserError: a file or a row is invalid.
    """
    data = load_data(args, encoder, vocab_size)
    # All rows together, so that a single held-out row can be paired with a training row.
    labeled = ChangedSamples(JoinedSamples(data.train, data.val), _with_label)
    samples = mismatch(labeled, args.max_length, args.truncation_strategy, args.seed)
    train, val = samples[: len(data.train)], samples[len(data.train) :]
    # The digest depends on the labels. Companions follow from the samples, and are not created for it.
    return replace(data, train=train, val=val, digest=digest(labeled))


def _with_label(number: int, sample: Sample) -> Sample:
    """Return the sample with its label, which `parse_rated` stores in `trains_heads`, as the extra `desirable`."""
    return sample.with_extras(desirable=sample.trains_heads)


def _with_companion(sample: Sample) -> Sample:
    """Return one sample with the two sequences that the reference model scores: the answer and its companion."""
    assert sample.companion is not None
    return replace(sample, others=(sample.companion,), companion=None)


def _scored(sample: Sample, log_p: float, companion_log_p: float) -> Sample:
    assert sample.companion is not None
    companion = sample.companion.with_extras(reference=companion_log_p)
    return replace(sample.with_extras(reference=log_p), companion=companion)


KTO = Training(
    make_encoder=partial(make_conversation_encoder, parse=parse_rated),
    load=load_rated,
    prepare=partial(score_with_reference, pair_of=_with_companion, scored=_scored),
    make_objective=lambda run: KtoObjective(run.plan.heads, run.args.mtp_loss_scaling_factor, preference_of(run.args)),
    extras=(REFERENCE, DESIRABLE),
)
