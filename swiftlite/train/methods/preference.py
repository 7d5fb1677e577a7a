"""Compute the losses of `megatron dpo` over pairs of answers, and the losses of MTP heads on the preferred answers.

Shapes: P pairs of a micro-batch, 2 the answers of a pair (the preferred one first), N all sequences of the micro-batch,
K the number of predictions (1 for the trunk, 1 for each MTP depth), B rows, S tokens of a row on this context-parallel
rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch.nn.functional import logsigmoid

from swiftlite.data.batch import Batch, Extra
from swiftlite.methods.dpo import FIGURES
from swiftlite.model.forward import forward_step_of
from swiftlite.model.forward_step import ForwardStep
from swiftlite.model.gpt import Losses
from swiftlite.model.loss.balance import Balance
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.plan.preference import Preference
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.methods.mtp_loss import (
    HeadObjective,
    add_heads,
    count_labels,
    head_coefficients,
    head_means,
    head_sums,
    mean_of,
)

REFERENCE = Extra("reference")
"""The log-probability of a sequence's labels under the reference model."""


@dataclass(frozen=True)
class Scores:
    """Scores of pairs of answers under a model and its reference model.

    Attributes:
        log_p_P2: log-probability of each answer under the model.
        tokens_P2: number of labels of each answer.
        reference_P2: log-probability of each answer under the reference.
    """

    log_p_P2: torch.Tensor
    tokens_P2: torch.Tensor
    reference_P2: torch.Tensor

    @property
    def mean_P2(self) -> torch.Tensor:
        """The model's log-probability per token."""
        return self.log_p_P2 / self.tokens_P2

    @property
    def ratio_P2(self) -> torch.Tensor:
        """log(model / reference) of each answer, from the probabilities of the whole answer."""
        return self.log_p_P2 - self.reference_P2

    @property
    def margin_P(self) -> torch.Tensor:
        """log(model / reference) of the chosen answer minus log(model / reference) of the rejected answer."""
        return self.ratio_P2[:, 0] - self.ratio_P2[:, 1]


def score(loss_BS: torch.Tensor, batch: Batch, mesh: Mesh) -> Scores:
    """Return the scores of the answers of a micro-batch, the same on every context-parallel rank.

    Args:
        loss_BS: the trunk's loss of each label; 0 at positions without a label.
        batch: this rank's part of the micro-batch.
    """
    log_p_N, tokens_N = log_probabilities_of(loss_BS, batch, mesh)
    # The preferred answer of a pair is followed by the rejected one.
    return Scores(log_p_N.view(-1, 2), tokens_N.view(-1, 2), batch.extras[REFERENCE.name].view(-1, 2))


def log_probabilities_of(loss_BS: torch.Tensor, batch: Batch, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability and the number of labels of each sequence of a micro-batch, [N] each.

    Both are the same on every context-parallel rank.

    Args:
        loss_BS: the trunk's loss of each label; 0 at positions without a label.
        batch: this rank's part of the micro-batch.
    """
    numbers = torch.arange(batch.num_sequences, device=loss_BS.device)
    # A matrix product instead of index_add, whose order of summation varies on a GPU.
    is_of_answer = (batch.sequence_KBS[0].flatten() == numbers[:, None]).float()
    log_p = is_of_answer @ -(loss_BS * batch.loss_scale_KBS[0]).flatten()
    is_target = on_device((batch.labels_KBS[0] != IGNORE_INDEX).flatten(), loss_BS.device)
    tokens = is_of_answer @ is_target.float()
    # The forward pass sums the ranks' parts of each answer; in the backward pass each rank gets its part's gradient.
    log_p = reduce_from_tensor_model_parallel_region(log_p, group=mesh.cp)
    return log_p, reduce_from_tensor_model_parallel_region(tokens, group=mesh.cp)


def pair_losses(scores: Scores, preference: Preference) -> torch.Tensor:
    """Compute the loss [P] of each pair, as TRL's DPOTrainer does.

    With the log-ratios w and l of policy and reference for the preferred and the rejected answer, their difference m =
    w - l, the smoothing e and s for the sigmoid, the losses are

        sigmoid   -(1 - e) log s(b m) - e log s(-b m)              DPO, arXiv 2305.18290
        robust    (-(1 - e) log s(b m) + e log s(-b m)) / (1 - 2 e)      arXiv 2403.00409
        hinge     max(0, 1 - b m)                                  SLiC-HF, arXiv 2305.10425
        ipo       (w / T_w - l / T_l - 1 / (2 b))^2, T tokens      IPO, arXiv 2310.12036
        apo_zero  1 - s(b w) + s(b l)                              APO, arXiv 2408.06266
        apo_down  s(b w) + 1 - s(b m)                              APO
        simpo     -log s(b (p_w - p_l) - g), p mean log-probabilities    SimPO, arXiv 2405.14734
        orpo      -b log s(log odds(p_w) - log odds(p_l))          ORPO, arXiv 2403.07691

    The losses simpo and orpo follow TRL's CPOTrainer and ORPOTrainer, without their next-token loss
    (`Preference.imitation`).
    """
    beta, smoothing = preference.beta, preference.label_smoothing
    match preference.loss_type:
        case "sigmoid":
            return _smoothed(beta * scores.margin_P, smoothing)
        case "robust":
            logits_P = beta * scores.margin_P
            right_P, wrong_P = -logsigmoid(logits_P), -logsigmoid(-logits_P)
            return ((1 - smoothing) * right_P - smoothing * wrong_P) / (1 - 2 * smoothing)
        case "hinge":
            return torch.relu(1 - beta * scores.margin_P)
        case "ipo":
            mean_P2 = scores.ratio_P2 / scores.tokens_P2
            return (mean_P2[:, 0] - mean_P2[:, 1] - 1 / (2 * beta)) ** 2
        case "apo_zero":
            likely_P2 = torch.sigmoid(beta * scores.ratio_P2)
            return 1 - likely_P2[:, 0] + likely_P2[:, 1]
        case "apo_down":
            return torch.sigmoid(beta * scores.ratio_P2[:, 0]) + 1 - torch.sigmoid(beta * scores.margin_P)
        case "simpo":
            mean_P2 = scores.mean_P2
            return _smoothed(beta * (mean_P2[:, 0] - mean_P2[:, 1]) - preference.simpo_gamma, smoothing)
        case "orpo":
            # log p - log(1 - p); log1p keeps the digits of 1 - p where p is small.
            log_odds_P2 = scores.mean_P2 - torch.log1p(-scores.mean_P2.exp())
            return -beta * logsigmoid(log_odds_P2[:, 0] - log_odds_P2[:, 1])
        case "kto":
            raise AssertionError("kto learns from single answers: its loss is in kto.py")


def _smoothed(logits_P: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Compute -log sigmoid(logits) with label smoothing. `smoothing` is the assumed share of pairs with swapped
    answers."""
    return -logsigmoid(logits_P) * (1 - smoothing) - logsigmoid(-logits_P) * smoothing


@dataclass(frozen=True)
class PreferenceObjective(HeadObjective):
    """The mean loss of all pairs of a global batch, plus losses on the tokens of the preferred answers.

    Let P be the number of pairs in the global batch, N_0 the number of labels of the preferred answers, N_k this number
    at MTP depth k, and a_k the weight of depth k as in `NextTokenObjective`. The loss is

        loss = sum(pair losses) / P + imitation * sum(CE) / N_0
             + mtp_loss_scaling_factor * sum_k( a_k * sum(L_k) / N_k )

    megatron-core divides all gradients by P at the end of the step, so the sums over tokens are multiplied by P / N_0
    or P / N_k.
    """

    preference: Preference
    num_sums = 1 + len(FIGURES) + 2  # the number of pairs, FIGURES, loss and number of preferred tokens

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Count targets, tokens, targets in preferred answers and pairs, for the trunk and each MTP depth.

        Returns int64 [4, K]; the number of pairs is the same in every column.
        """
        counts = torch.zeros(4, 1 + self.heads.drafts, dtype=torch.int64)
        counts[:2] = count_labels(batches, self.heads)
        for batch in batches:
            is_target_KBS = batch.labels_KBS != IGNORE_INDEX
            counts[2] += (is_target_KBS & _is_preferred(batch)).sum(dim=(1, 2)).cpu()
            counts[3] += batch.num_sequences // 2
        return counts

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        """Return a forward step that gives the loss, the number of pairs and the statistics of each micro-batch."""
        _, tokens, targets, (num_pairs, *_) = counts.tolist()
        imitation = self.preference.imitation * num_pairs / max(targets[0], 1)
        coefficients = head_coefficients(self.heads, self.mtp_loss_scaling_factor, targets[1:], num_pairs)
        balance = Balance(tokens, divisor=num_pairs)
        counts_here = mesh.cp.rank() == 0  # context-parallel ranks have the same scores

        def loss_of(losses: Losses, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            scores = score(losses.main.loss_BS, batch, mesh)
            losses_P = pair_losses(scores, self.preference)
            preferred = (losses.main.loss_BS * batch.loss_scale_KBS[0] * _is_preferred(batch)).sum()
            total = losses_P.sum() + imitation * preferred
            total = add_heads(total, losses, batch.loss_scale_KBS, coefficients)
            pairs = torch.full((), len(losses_P) * counts_here, dtype=torch.int32, device=total.device)
            figures = self._figures(scores, losses_P) * counts_here
            # From the predictions, because the labels are on the host (`on_this_rank`).
            is_target_BS = losses.main.prediction_BS != -1
            num_tokens = (is_target_BS & _is_preferred(batch)).sum()
            imitated = torch.stack([preferred.detach().double(), num_tokens.double()])
            heads = head_sums(losses, batch, mesh)
            return total, pairs, torch.cat([pairs.double()[None], figures, imitated, heads])

        return forward_step_of(loss_of, balance)

    @torch.no_grad()
    def _figures(self, scores: Scores, losses_P: torch.Tensor) -> torch.Tensor:
        """Return sums over the pairs of a micro-batch, float64, in the order of FIGURES."""
        log_p_P2 = scores.log_p_P2
        if self.preference.is_per_token:
            log_p_P2 = scores.mean_P2
        rewards_P2 = self.preference.beta * (log_p_P2 - scores.reference_P2)
        chosen_P, rejected_P = rewards_P2.unbind(dim=1)
        rows = [losses_P, chosen_P, rejected_P, chosen_P > rejected_P, chosen_P - rejected_P, *log_p_P2.unbind(dim=1)]
        return torch.stack([row.double().sum() for row in rows])

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """Return the metrics in FIGURES by name, and `mtp_K_loss` and `mtp_K_acceptance` of each depth K on the
        preferred answers.

        If preferred answers are also imitated (`Preference.imitation`), `nll_loss` is added, and `loss` includes it.
        """
        pairs, *rest = sums.tolist()
        figures = rest[: len(FIGURES)]
        named = {name: mean_of(figure, pairs) for name, figure in zip(FIGURES, figures, strict=True)}
        if self.preference.imitation:
            loss, tokens = rest[len(FIGURES) : len(FIGURES) + 2]
            named["nll_loss"] = mean_of(loss, tokens)
            named["loss"] += self.preference.imitation * named["nll_loss"]
        return named | head_means(sums[1 + len(FIGURES) + 2 :])


def _is_preferred(batch: Batch) -> torch.Tensor:
    """Return which tokens belong to a preferred answer, bool [B, S]."""
    return batch.sequence_KBS[0] % 2 == 0  # false for padding, -1
