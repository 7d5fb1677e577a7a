"""Compute the advantages of completions from their rewards, with numpy.

A group consists of the completions of one prompt. The formulas are those of TRL's GRPOTrainer and RLOOTrainer,
the last estimator is that of ms-swift:

    grpo                  A = R - mean of the group
    rloo                  A = R - mean of the other completions of the group
    reinforce_plus_plus   A = R - mean of the group
    scale                 group: A / (std of the group + 1e-4); batch: A / (std of the batch + 1e-4); none: A

With reinforce_plus_plus, the std of the batch is that of the A's instead of the rewards (REINFORCE++ baseline,
arXiv 2501.03262): the differences between groups do not count. The standard deviations have n - 1 in the denominator.
Computation is in float64.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftlite.args.rl_fields import AdvantageEstimator, RewardScale

STD_EPSILON = 1e-4
SCALES: Mapping[AdvantageEstimator, RewardScale] = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}
"""Defaults of --scale_rewards by estimator."""
FLAT_STD = 1e-8
"""Largest standard deviation of a group whose rewards count as equal; the default tolerance of `torch.isclose`."""


@dataclass(frozen=True)
class AdvantageSettings:
    """Select how advantages are computed.

    Attributes:
        num_generations: completions per group.
        estimator: baseline that is subtracted from a reward, see the module's docstring.
        scale: standard deviation by which the difference is divided. TRL's `rloo` corresponds to `none`.
        weights: weight of each reward function; 1 for each function if empty.
    """

    num_generations: int
    estimator: AdvantageEstimator = "grpo"
    scale: RewardScale = "group"
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class RewardStatistics:
    """Metrics of the rewards of a batch. A mean or standard deviation of too few values is 0.

    Attributes:
        mean: mean total reward of the scored completions.
        std: standard deviation of these rewards, over the whole batch.
        frac_reward_zero_std: fraction of groups in which all advantages are 0, because all rewards are equal or fewer
            than two completions have a reward.
        function_means: mean reward per function, without its weight.
        function_stds: standard deviation of these rewards per function.
        function_unscored: number of completions per function that the function did not score.
        num_unscored: number of completions that no function scored.
    """

    mean: float
    std: float
    frac_reward_zero_std: float
    function_means: tuple[float, ...]
    function_stds: tuple[float, ...]
    function_unscored: tuple[int, ...]
    num_unscored: int


@dataclass(frozen=True)
class Advantages:
    """Advantages of a batch.

    Attributes:
        rewards: [completions] weighted sum over the functions that scored a completion, NaN if no function did.
        advantages: [completions] float32, 0 for completions without a reward.
        is_flat: [groups] whether all advantages of a group are 0, as in `RewardStatistics.frac_reward_zero_std`.
    """

    rewards: NDArray[np.float64]
    advantages: NDArray[np.float32]
    is_flat: NDArray[np.bool_]
    statistics: RewardStatistics


def compute_advantages(scores: ArrayLike, settings: AdvantageSettings) -> Advantages:
    """Return the advantages and statistics of a batch.

    Completions without a score are excluded from means and standard deviations.

    Args:
        scores: [completions, functions], NaN where a function did not score a completion. The completions of a group
            are adjacent; the number of completions is a multiple of `num_generations`.
    """
    scores = np.asarray(scores, np.float64)
    is_scored = ~np.isnan(scores)
    weights = np.asarray(settings.weights or (1.0,) * scores.shape[1])
    rewards = np.where(is_scored.any(axis=1), np.where(is_scored, scores, 0.0) @ weights, np.nan)

    grouped = rewards.reshape(-1, settings.num_generations)
    count, deviation, std = _centered(grouped)
    batch_std = float(_centered(rewards[None])[2][0, 0])
    advantages = deviation
    if settings.estimator == "rloo":  # R - (sum - R) / (n - 1)
        advantages = deviation * count / np.maximum(count - 1, 1)
    if settings.scale == "group":
        advantages = advantages / (std + STD_EPSILON)
    elif settings.scale == "batch":
        scale = batch_std
        if settings.estimator == "reinforce_plus_plus":
            scale = float(_centered(np.where(np.isnan(grouped), np.nan, advantages).reshape(1, -1))[2][0, 0])
        advantages = advantages / (scale + STD_EPSILON)

    is_flat = (std <= FLAT_STD)[:, 0]
    statistics = RewardStatistics(
        mean=_mean(rewards),
        std=batch_std,
        frac_reward_zero_std=float(is_flat.mean()),
        function_means=tuple(_mean(column) for column in scores.T),
        function_stds=tuple(_centered(scores.T)[2][:, 0].tolist()),
        function_unscored=tuple(int(number) for number in (~is_scored).sum(axis=0)),
        num_unscored=int(np.isnan(rewards).sum()),
    )
    return Advantages(rewards, advantages.reshape(-1).astype(np.float32), is_flat, statistics)


def _centered(rewards: NDArray[np.float64]) -> tuple[NDArray, NDArray, NDArray]:
    """Return per row of [rows, n] the number of values that are not NaN [rows, 1], the differences to their mean
    [rows, n], which are 0 where the value is NaN, and their standard deviation [rows, 1]."""
    is_scored = ~np.isnan(rewards)
    count = is_scored.sum(axis=1, keepdims=True)
    mean = np.where(is_scored, rewards, 0.0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    deviation = np.where(is_scored, rewards - mean, 0.0)
    return count, deviation, np.sqrt((deviation**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))


def _mean(values: NDArray[np.float64]) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if present.size else 0.0
