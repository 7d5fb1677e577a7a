"""Compute the losses of `megatron grpo` over sampled completions, and the losses of MTP heads on their tokens.

Shapes: B rows, S tokens of a row on this context-parallel rank, N sequences of the micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from swiftlite.data.batch import Batch, Extra
from swiftlite.model.forward import forward_step_of
from swiftlite.model.forward_step import ForwardStep
from swiftlite.model.gpt import Losses
from swiftlite.model.loss.balance import Balance
from swiftlite.model.loss.losses import IGNORE_INDEX, TokenLoss
from swiftlite.plan.policy import Policy
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.methods.mtp_loss import (
    HeadObjective,
    add_heads,
    count_labels_and_sequences,
    head_coefficients,
    head_means,
    head_sums,
    mean_of,
)

ADVANTAGE = Extra("advantage", per="label")
"""The advantage of each token of a completion."""
OLD = Extra("old_log_p", per="label", default=float("nan"))
"""The log-probability of each token under the policy that generated it, computed by the trainer. NaN: that policy is
the current one; `Rollouts` stores numbers if it uses a generation for several steps."""
ENGINE = Extra("engine_log_p", per="label", default=float("nan"))
"""The log-probability of each token as the engine reported it; NaN if it is unknown."""
REFERENCE = Extra("reference_log_p", per="label")
"""The log-probability of each token under the reference model."""
TEACHER = Extra("teacher_log_p", per="label")
"""The log-probability of each token under the teacher."""
PER_TOKEN = ("loss", "kl", "teacher_kl", "entropy", "weight", "difference", "known")
"""Statistics that are sums of one value per token. `difference` is that of the log-probabilities of trainer and engine,
`known` is 1 where the engine reported one."""
SUMS = ("targets", *PER_TOKEN, "tokens", "low", "high", "clippable", "squared_weight")
"""Statistics of a micro-batch, without those of the heads. `targets` is what the loss is divided by; `low` and `high`
count ratios beyond the bounds, among `clippable` ones."""
MAXIMA = ("-low", "high", "difference", "-weight", "weight")
"""Statistics whose maximum is taken: shares of clipped tokens of a completion, and values of tokens; `-`: negated, for
the minimum."""


@dataclass(frozen=True)
class LabeledTokens:
    """The tokens with a label of a micro-batch, and which sequence each belongs to.

    Attributes:
        is_target_BS: float32; 1 at positions with a label.
        is_of_NT: float32 [N, B * S]; 1 if a position belongs to a sequence.
        mesh: the ranks that hold the model.
    """

    is_target_BS: torch.Tensor
    is_of_NT: torch.Tensor
    mesh: Mesh

    @classmethod
    def of(cls, batch: Batch, mesh: Mesh) -> "LabeledTokens":
        """Describe this rank's part of a micro-batch."""
        sequence_BS = batch.sequence_KBS[0]
        numbers_N1 = torch.arange(batch.num_sequences, device=sequence_BS.device)[:, None]
        is_target_BS = on_device(batch.labels_KBS[0] != IGNORE_INDEX, sequence_BS.device).float()
        return cls(is_target_BS, (sequence_BS.flatten() == numbers_N1).float(), mesh)

    def sums(self, values_BS: torch.Tensor) -> torch.Tensor:
        """Sum values over the labels of each sequence, [N], over all context-parallel ranks.

        Each rank uses the sums for its own tokens only, and has a part of their gradient. Of the two functions below,
        the first sums values in the forward pass, the second sums gradients in the backward pass.
        """
        # A matrix product instead of index_add, whose order of summation varies on a GPU.
        sums_N = self.is_of_NT @ (values_BS * self.is_target_BS).flatten()
        sums_N = reduce_from_tensor_model_parallel_region(sums_N, group=self.mesh.cp)
        return copy_to_tensor_model_parallel_region(sums_N, group=self.mesh.cp)

    def per_token(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the value of its sequence for each position, [B, S]; 0 for padding."""
        return (values_N @ self.is_of_NT).view_as(self.is_target_BS)

    @property
    def lengths_N(self) -> torch.Tensor:
        """Number of labels of each sequence, at least 1."""
        return self.sums(self.is_target_BS).clamp(min=1)


def ratio_of(log_p_BS: torch.Tensor, old_BS: torch.Tensor, tokens: LabeledTokens, policy: Policy) -> torch.Tensor:
    """Return the probability ratio of policy and old policy for each token, [B, S].

    With the level `sequence`, all tokens of a completion have the geometric mean of their ratios, exp(sum_t (log p_it -
    log old_it) / T_i) (GSPO, arXiv 2507.18071).
    """
    log_ratio_BS = log_p_BS - old_BS
    if policy.importance_sampling_level == "sequence":
        log_ratio_BS = tokens.per_token(tokens.sums(log_ratio_BS) / tokens.lengths_N)
    return log_ratio_BS.exp()


@torch.no_grad()
def mismatch_of(old_BS: torch.Tensor, engine_BS: torch.Tensor, tokens: LabeledTokens, policy: Policy) -> torch.Tensor:
    """Return the weight [B, S] that corrects for tokens drawn with the engine's probabilities instead of the trainer's.

    The weight is 1 where the engine's log-probability is unknown.
    """
    if policy.mismatch_mode == "none":
        return torch.ones_like(old_BS)
    difference_BS = (old_BS - engine_BS).nan_to_num(0.0)
    # For example token_truncate, or sequence_mask.
    level, treatment = policy.mismatch_mode.split("_")
    if level == "sequence":
        difference_BS = tokens.per_token(tokens.sums(difference_BS))
    weight_BS = difference_BS.exp()
    if treatment == "truncate":
        return weight_BS.clamp(max=policy.mismatch_threshold)
    return torch.where(weight_BS <= policy.mismatch_threshold, weight_BS, 0.0)


def token_losses(
    log_p_BS: torch.Tensor, ratio_BS: torch.Tensor, advantage_BS: torch.Tensor, policy: Policy
) -> torch.Tensor:
    """Compute the policy loss of each token without corrections, [B, S], as TRL's GRPOTrainer does.

    With the ratio r, the advantage A and the bounds low and high, the loss is

        grpo, dapo, dr_grpo    -min(r A, clip(r, low, high) A)
        cispo                  -stop_gradient(min(r, high)) A log p
        sapo                   -(4 / t) sigmoid(t (r - 1)) A

    The first is PPO's (arXiv 1707.06347), with the bounds of DAPO (arXiv 2503.14476). CISPO (MiniMax-M1,
    arXiv 2506.13585) clips the weight of a token instead of dropping the token's gradient. SAPO (arXiv 2511.20347)
    lowers the gradient smoothly with the distance of r from 1; its temperature t depends on the sign of A. `delta`
    bounds r from above also for negative advantages (INTELLECT-2, arXiv 2505.07291).
    """
    if policy.loss_type == "sapo":
        positive, other = policy.sapo_temperatures
        temperature_BS = torch.where(advantage_BS > 0, positive, other)
        return -(4 / temperature_BS) * torch.sigmoid(temperature_BS * (ratio_BS - 1)) * advantage_BS
    if policy.loss_type == "cispo":
        return -ratio_BS.clamp(max=policy.clip_high).detach() * advantage_BS * log_p_BS
    # Before `delta`, which bounds only the term that is not clipped, as in TRL.
    clipped_BS = ratio_BS.clamp(policy.clip_low, policy.clip_high)
    if policy.delta is not None:
        ratio_BS = ratio_BS.clamp(max=policy.delta)
    return -torch.min(ratio_BS * advantage_BS, clipped_BS * advantage_BS)


def kl_of(log_p_BS: torch.Tensor, reference_BS: torch.Tensor, ratio_BS: torch.Tensor, policy: Policy) -> torch.Tensor:
    """Estimate the KL divergence of policy and reference from each token (the estimator k3), [B, S].

    The tokens were drawn by the old policy, so the estimate is multiplied by the ratio of policy and old policy. Even
    where this ratio is 1, its gradient is not 0: without the factor, the gradient of k3 is not that of the reverse KL
    divergence, which it estimates (DeepSeek-V3.2, arXiv 2512.02556).
    """
    difference_BS = reference_BS - log_p_BS
    kl_BS = difference_BS.exp() - difference_BS - 1
    if policy.corrects_kl:
        return kl_BS * ratio_BS
    return kl_BS


def teacher_kl_of(old_BS: torch.Tensor, teacher_BS: torch.Tensor) -> torch.Tensor:
    """Estimate the KL divergence of old policy and teacher from each token (the estimator k1), [B, S].

    Its mean over sampled tokens is the reverse KL divergence. Tokens that the teacher prefers have negative values.
    """
    return old_BS - teacher_BS


@dataclass(frozen=True)
class PolicyObjective(HeadObjective):
    """The loss of all completions of a global batch, plus losses of the MTP heads on their tokens.

    With a teacher, the advantage of a token is its reward's minus `teacher_kl_coef` times `teacher_kl_of`. Its gradient
    is that of the reverse KL divergence at this token (on-policy distillation).

    Let l_it be the loss of token t of completion i, T_i the number of its tokens, N the number of completions and L the
    maximum length. The loss is

        dapo, cispo    sum_it l_it / sum_i T_i
        grpo, sapo     sum_i ( sum_t l_it / T_i ) / N
        dr_grpo        sum_it l_it / (N * L)
        bnpo           the mean over micro-batches of sum_it l_it / sum_i T_i of a micro-batch

    of DAPO (arXiv 2503.14476), GRPO (DeepSeekMath, arXiv 2402.03300) and Dr. GRPO (arXiv 2503.20783),
    minus `entropy_coef` times the mean entropy over all tokens,
    plus, for each MTP depth, the mean over all tokens of completions, as in `NextTokenObjective`. The heads learn from
    all completions, whatever their advantage.

    Attributes:
        figures: further metrics of the global batch, such as its rewards.
    """

    policy: Policy
    figures: Mapping[str, float] = field(default_factory=dict)

    nonfinite_hint = "lower --lr, --beta, --teacher_kl_coef or --mtp_loss_scaling_factor"
    num_maxima = len(MAXIMA)
    num_sums = len(SUMS) + num_maxima

    def prepare(self, model: Sequence[torch.nn.Module], mesh: Mesh, batches: Sequence[Batch]) -> "PolicyObjective":
        """Return the objective with the metrics of these completions."""
        return replace(self, figures=getattr(batches, "figures", {}))

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Count targets, tokens, completions and micro-batches, for the trunk and each MTP depth: int64 [4, K]."""
        counts = count_labels_and_sequences(batches, self.heads)
        return torch.cat([counts, torch.full_like(counts[:1], len(batches))])

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        """Return a forward step that gives the loss, the number of targets and the statistics of each micro-batch."""
        targets, tokens, (num_completions, *_), (num_batches, *_) = counts.tolist()
        # What the gradients are divided by at the end of the step; the coefficients of the other terms make up for it.
        divisor = targets[0] if self.policy.divides_by_tokens else num_completions
        if self.policy.loss_type == "bnpo":
            divisor = num_batches
        entropy_coef = mean_of(self.policy.entropy_coef * divisor, targets[0])
        coefficients = head_coefficients(self.heads, self.mtp_loss_scaling_factor, targets[1:], divisor)
        balance = Balance(tokens, divisor=divisor)
        is_first = mesh.cp.rank() == 0  # context-parallel ranks have the same completions

        def loss_of(losses: Losses, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            labeled = LabeledTokens.of(batch, mesh)
            loss, statistics, maxima = self._policy_loss(losses.main, batch, labeled, entropy_coef, is_first)
            total = add_heads(loss, losses, batch.loss_scale_KBS, coefficients)
            number = batch.num_sequences * is_first
            if self.policy.loss_type == "bnpo":
                # megatron-core divides the gradients by the sum of these numbers: one per micro-batch gives their mean.
                number = int(is_first)
            if self.policy.divides_by_tokens:
                number = int((batch.labels_KBS[0] != IGNORE_INDEX).sum())
            num_targets = torch.full((), number, dtype=torch.int32, device=total.device)
            parts = [num_targets.double()[None], statistics, head_sums(losses, batch, mesh), maxima]
            return total, num_targets, torch.cat(parts)

        return forward_step_of(loss_of, balance, with_entropy=True, trains_entropy=self.policy.entropy_coef > 0)

    def _policy_loss(
        self, main: TokenLoss, batch: Batch, tokens: LabeledTokens, entropy_coef: float | torch.Tensor, is_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the sum to minimize for this rank's tokens, the statistics, and those of which the maximum is taken.

        Args:
            entropy_coef: weight of the entropy of each token in this sum; with bnpo, it is that of the mean.
        """
        policy, extras, log_p_BS = self.policy, batch.extras, -main.loss_BS
        old_BS = extras[OLD.name]
        # Detached: the ratio is 1, but its gradient is that of log p.
        old_BS = torch.where(old_BS.isnan(), log_p_BS.detach(), old_BS)
        ratio_BS = ratio_of(log_p_BS, old_BS, tokens, policy)
        weight_BS = mismatch_of(old_BS, extras[ENGINE.name], tokens, policy)
        advantage_BS = extras[ADVANTAGE.name]
        teacher_kl_BS = torch.zeros_like(advantage_BS)
        if policy.teacher_kl_coef:
            teacher_kl_BS = teacher_kl_of(old_BS, extras[TEACHER.name])
            advantage_BS = advantage_BS - policy.teacher_kl_coef * teacher_kl_BS
        # As in TRL, the weight is not that of the KL term.
        loss_BS = token_losses(log_p_BS, ratio_BS, advantage_BS, policy) * weight_BS
        kl_BS = torch.zeros_like(loss_BS)
        if policy.beta:
            kl_BS = kl_of(log_p_BS, extras[REFERENCE.name], ratio_BS, policy)
            loss_BS = loss_BS + policy.beta * kl_BS
        if policy.divides_by_lengths:
            # The length of padding is 0. Divided by it, a loss would be NaN, which the mask of targets does not remove.
            loss_BS = loss_BS / tokens.per_token(tokens.lengths_N).clamp(min=1)
        elif policy.loss_type == "dr_grpo":
            loss_BS = loss_BS / policy.max_completion_length
        elif policy.loss_type == "bnpo":
            number = tokens.sums(tokens.is_target_BS).sum().clamp(min=1)
            loss_BS, entropy_coef = loss_BS / number, policy.entropy_coef / number
        assert main.entropy_BS is not None
        if policy.entropy_coef:
            loss_BS = loss_BS - entropy_coef * main.entropy_BS
        loss = (loss_BS * tokens.is_target_BS).sum()
        values = {"loss": loss_BS, "kl": kl_BS, "teacher_kl": teacher_kl_BS}
        values |= {"entropy": main.entropy_BS, "weight": weight_BS}
        difference_BS = (old_BS - extras[ENGINE.name]).abs()
        values |= {"difference": difference_BS.nan_to_num(0.0), "known": (~difference_BS.isnan()).float()}
        clipped = self._clipped(ratio_BS, advantage_BS)
        return loss, _statistics(values, clipped, tokens, policy, is_first), _maxima(values, clipped, tokens)

    def _clipped(self, ratio_BS: torch.Tensor, advantage_BS: torch.Tensor) -> list[torch.Tensor]:
        """Return where the ratio is clipped at its lower and at its upper bound, [B, S] each."""
        is_low_BS = (ratio_BS < self.policy.clip_low) & (advantage_BS < 0)
        if self.policy.loss_type == "cispo":
            # cispo has no lower bound.
            is_low_BS = torch.zeros_like(is_low_BS)
        return [is_low_BS, (ratio_BS > self.policy.clip_high) & (advantage_BS > 0)]

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """Return the loss and the statistics of the policy, those of the heads, and `figures`.

        Clip ratios are shares of tokens; with the level `sequence`, of completions.
        """
        found = dict(zip(SUMS, sums[: len(SUMS)].tolist(), strict=True))
        most = dict(zip(MAXIMA, sums[-len(MAXIMA) :].tolist(), strict=True))
        metrics = {
            "loss": mean_of(found["loss"], found["targets"]),
            "entropy": mean_of(found["entropy"], found["tokens"]),
        }
        if self.policy.beta:
            metrics["kl"] = mean_of(found["kl"], found["tokens"])
        if self.policy.teacher_kl_coef:
            metrics["teacher_kl"] = mean_of(found["teacher_kl"], found["tokens"])
        low, high = (mean_of(found[name], found["clippable"]) for name in ("low", "high"))
        if self.policy.loss_type == "cispo":
            metrics["cispo_clip_ratio"] = high
        elif self.policy.loss_type != "sapo":
            metrics |= {
                "clip_ratio/low_mean": low,
                "clip_ratio/high_mean": high,
                "clip_ratio/region_mean": low + high,
            }
            if found["tokens"]:
                metrics |= {"clip_ratio/low_min": -most["-low"], "clip_ratio/high_max": most["high"]}
        if found["known"]:
            metrics["sampling/sampling_logp_difference/mean"] = found["difference"] / found["known"]
            metrics["sampling/sampling_logp_difference/max"] = most["difference"]
            if self.policy.mismatch_mode != "none":
                metrics["sampling/importance_sampling_ratio/min"] = -most["-weight"]
                metrics["sampling/importance_sampling_ratio/max"] = most["weight"]
        if self.policy.mismatch_mode != "none":
            metrics["rollout/importance_weight"] = mean_of(found["weight"], found["tokens"])
            # Kish's effective sample size as a share of the tokens: (sum w)^2 / (n sum w^2), 1 for equal weights.
            metrics["rollout/effective_tokens"] = mean_of(
                found["weight"] ** 2, found["tokens"] * found["squared_weight"]
            )
        own = {**metrics, **head_means(sums[len(SUMS) : -len(MAXIMA)])}
        return {**own, **self.figures, **own}  # reward functions can name their metrics as they like


@torch.no_grad()
def _statistics(
    values: Mapping[str, torch.Tensor],
    clipped: Sequence[torch.Tensor],
    tokens: LabeledTokens,
    policy: Policy,
    is_first: bool,
) -> torch.Tensor:
    """Return sums over this rank's tokens, float64, in the order of `SUMS` without `targets`.

    Args:
        values: the values in `PER_TOKEN` by name, [B, S] each.
        clipped: where the ratio is clipped, [B, S] each.
        is_first: whether this is the first context-parallel rank, which counts completions.
    """

    def total(values_BS: torch.Tensor) -> torch.Tensor:
        return (values_BS * tokens.is_target_BS).sum().double()

    sums = [total(values[name]) for name in PER_TOKEN]
    num_tokens = tokens.is_target_BS.sum().double()
    if policy.importance_sampling_level == "token":
        counted = [*map(total, clipped), num_tokens]
    else:
        lengths_N = tokens.lengths_N
        of_sequences = [(tokens.sums(is_clipped_BS.float()) / lengths_N).sum() for is_clipped_BS in clipped]
        counted = [each.double() * is_first for each in of_sequences]
        counted.append(torch.full_like(num_tokens, len(lengths_N) * is_first))
    return torch.stack([*sums, num_tokens, *counted, total(values["weight"] ** 2)])


@torch.no_grad()
def _maxima(values: Mapping[str, torch.Tensor], clipped: Sequence[torch.Tensor], tokens: LabeledTokens) -> torch.Tensor:
    """Return the statistics of this rank's tokens in the order of `MAXIMA`, float64; -inf without tokens.

    The arguments are those of `_statistics`.
    """
    has_tokens_N, has_label_BS = tokens.sums(tokens.is_target_BS) > 0, tokens.is_target_BS > 0
    low_N, high_N = (tokens.sums(is_clipped_BS.float()) / tokens.lengths_N for is_clipped_BS in clipped)
    weight_BS = values["weight"]
    counted = [(has_tokens_N, -low_N), (has_tokens_N, high_N), (has_label_BS, values["difference"])]
    counted += [(has_label_BS, -weight_BS), (has_label_BS, weight_BS)]
    none = weight_BS.new_full((1,), -torch.inf)
    # Not by a mask as an index, for whose size the host would wait.
    of_each = [torch.cat([torch.where(mask, value, -torch.inf).flatten(), none]).max() for mask, value in counted]
    return torch.stack(of_each).double()
