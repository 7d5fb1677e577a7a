"""Test advantages against a naive implementation of the formulas, and against numbers computed by hand."""

import math
import statistics
from typing import Any

import numpy as np
import pytest

from swiftlite.rewards.advantages import SCALES, AdvantageSettings, compute_advantages

NONE = math.nan


def naive(scores: np.ndarray, settings: AdvantageSettings) -> list[float]:
    """Return the advantages by loops over groups and completions."""
    totals = []
    for row in scores:
        terms = [weight * score for weight, score in zip(settings.weights, row, strict=True) if not math.isnan(score)]
        totals.append(sum(terms) if terms else None)
    scored = [total for total in totals if total is not None]
    advantages = []
    for position, total in enumerate(totals):
        start = position - position % settings.num_generations
        group = [other for other in totals[start : start + settings.num_generations] if other is not None]
        if total is None or len(group) < 2:
            advantages.append(0.0)
            continue
        advantage = total - statistics.mean(group)
        if settings.estimator == "rloo":
            advantage = total - (sum(group) - total) / (len(group) - 1)
        if settings.scale == "group":
            advantage /= statistics.stdev(group) + 1e-4
        elif settings.scale == "batch" and settings.estimator != "reinforce_plus_plus":
            advantage /= statistics.stdev(scored) + 1e-4
        advantages.append(advantage)
    if (settings.estimator, settings.scale) == ("reinforce_plus_plus", "batch"):
        of_scored = [each for each, total in zip(advantages, totals, strict=True) if total is not None]
        advantages = [each / (statistics.stdev(of_scored) + 1e-4) for each in advantages]
    return advantages


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_formulas(estimator, scale):
    numbers = np.random.default_rng(0)
    scores = numbers.normal(size=(60, 3))
    scores[numbers.random(scores.shape) < 0.4] = NONE
    settings = AdvantageSettings(5, estimator, scale, weights=(1.0, 0.5, -2.0))
    advantages = compute_advantages(scores, settings).advantages
    assert advantages.dtype == np.float32
    assert np.isnan(scores).all(axis=1).any(), "the case without any score is covered"
    # Advantages are rounded to float32, relative 6e-8; the sums of the reference are in another order.
    np.testing.assert_allclose(advantages, naive(scores, settings), rtol=1e-6, atol=1e-12)


def test_a_group_by_hand():
    scores = [[1.0], [0.0], [0.0], [1.0]]
    std = math.sqrt(4 * 0.25 / 3)
    expected: dict[tuple[Any, Any], float] = {
        ("grpo", "group"): 0.5 / (std + 1e-4),
        ("grpo", "none"): 0.5,
        ("rloo", "none"): 1 - 1 / 3,
        ("reinforce_plus_plus", "batch"): 0.5 / (std + 1e-4),
    }
    for (estimator, scale), first in expected.items():
        result = compute_advantages(scores, AdvantageSettings(4, estimator, scale))
        np.testing.assert_allclose(result.advantages, [first, -first, -first, first], rtol=1e-6)  # float32


def test_reinforce_plus_plus_ignores_differences_between_groups():
    near, far = ([[0.0], [1.0], [offset], [offset + 1]] for offset in (0.0, 1000.0))
    settings = AdvantageSettings(2, "reinforce_plus_plus", SCALES["reinforce_plus_plus"])
    results = [compute_advantages(scores, settings).advantages for scores in (near, far)]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-9)
    assert results[0][1] == pytest.approx(0.5 / (math.sqrt(1 / 3) + 1e-4))


def test_completions_without_a_score_are_left_out():
    scores = [[2.0, NONE], [NONE, NONE], [NONE, 4.0], [NONE, NONE], [NONE, NONE], [3.0, 3.0]]
    result = compute_advantages(scores, AdvantageSettings(3, "grpo", "none", weights=(1.0, 0.5)))
    np.testing.assert_array_equal(result.rewards, [2.0, NONE, 2.0, NONE, NONE, 4.5])
    np.testing.assert_array_equal(result.advantages, [0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(result.is_flat, [True, True])  # equal rewards, a single reward
    assert result.statistics.num_unscored == 3
    assert result.statistics.function_unscored == (4, 4)
    assert result.statistics.function_means == (2.5, 3.5)
    assert result.statistics.mean == pytest.approx(8.5 / 3)
    assert result.statistics.std == pytest.approx(statistics.stdev([2.0, 2.0, 4.5]))
    assert result.statistics.frac_reward_zero_std == 1.0


def test_flat_groups_are_counted():
    result = compute_advantages([[1], [1], [0], [1], [0.1 + 0.2], [0.3]], AdvantageSettings(2))
    np.testing.assert_array_equal(result.is_flat, [True, False, True])
    assert result.statistics.frac_reward_zero_std == pytest.approx(2 / 3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_nothing_scored(scale):
    result = compute_advantages([[NONE, NONE]] * 4, AdvantageSettings(2, scale=scale))
    np.testing.assert_array_equal(result.advantages, [0, 0, 0, 0])
    assert (result.statistics.mean, result.statistics.std) == (0, 0)
    assert result.statistics.function_means == (0, 0)
    assert result.statistics.num_unscored == 4
