"""Test the size of rounds with given times."""

import pytest

from swiftlite.improve.speedup.budget import (
    CANDIDATE_COST,
    MAX_RESERVED,
    MIN_BENCH,
    SMALLEST_ROUND,
    STARTS,
    RoundTimes,
    bench_rounds,
    bench_seconds,
    first_round,
    next_round,
    reserved_for_bench,
    seconds_per_prompt,
)
from swiftlite.improve.speedup.held_out import MIN_ROWS

FIRST = RoundTimes(prompts=100, answers=50, training=100, fixed=20)


def time_of(prompts: int, rounds: list[RoundTimes]) -> float:
    """Return the time of a round if times grow as assumed."""
    last = rounds[-1]
    total = sum(each.prompts for each in rounds)
    return last.answers * prompts / last.prompts + last.training * (total + prompts) / total + last.fixed


def test_the_first_round_is_smaller_within_a_small_budget():
    assert 0 < first_round(600) < first_round(3600)


def test_the_first_round_is_smaller_on_a_slow_machine():
    assert first_round(480, seconds_per_prompt=0.01) == 192
    assert first_round(480, seconds_per_prompt=2.0) == 108  # 216 of the 480 seconds
    assert first_round(480, seconds_per_prompt=2.0, spent=80) == 90  # 180 of the other 400 seconds
    assert first_round(480, seconds_per_prompt=99.0) == SMALLEST_ROUND > MIN_ROWS


def test_a_prompt_takes_longer_with_a_larger_model():
    small, large = seconds_per_prompt(10**6, 128), seconds_per_prompt(10**9, 128)
    assert 0 < small < large


def test_bench_takes_the_rest_of_the_budget():
    assert bench_seconds(480, 200) == pytest.approx(0.7 * 220)
    assert bench_seconds(480, 200, later=50) == pytest.approx(0.7 * 170)
    assert bench_seconds(1480, 200, later=50, number=2) == pytest.approx(0.7 * (1230 / 2 - 60))
    assert bench_seconds(480, 900) == 60


@pytest.mark.parametrize("rounds", [[FIRST], [FIRST, RoundTimes(prompts=150, answers=80, training=250, fixed=20)]])
def test_a_round_uses_the_rest_and_leaves_the_share_of_bench(rounds):
    budget, spent = 2000.0, 170.0
    prompts = next_round(budget, spent, rounds)
    rest = budget - reserved_for_bench(budget) - spent
    assert time_of(prompts, rounds) <= rest < time_of(prompts + 1, rounds)


def test_a_round_leaves_the_time_for_another_drafter():
    budget, spent = 4000.0, 170.0
    rest = budget - reserved_for_bench(budget) - spent - STARTS - MIN_BENCH

    def with_candidate(prompts: int) -> float:
        training = FIRST.training * (FIRST.prompts + prompts) / FIRST.prompts
        return time_of(prompts, [FIRST]) + CANDIDATE_COST * training + FIRST.fixed

    prompts = next_round(budget, spent, [FIRST], compares=True)
    assert with_candidate(prompts) <= rest < with_candidate(prompts + 1)


def test_no_round_that_is_not_worth_its_fixed_costs():
    # 49 prompts would fit.
    budget = (170 + time_of(49, [FIRST])) / 0.7
    assert next_round(budget, 170, [FIRST]) == 0
    assert next_round(budget * 1.05, 170, [FIRST]) >= 50
    assert next_round(100, 170, [FIRST]) == 0


def test_a_round_is_not_larger_than_the_rows():
    assert first_round(3600, 40) == 40
    assert next_round(1e6, 170, [FIRST], 60) == 60
    assert next_round(1e6, 170, [FIRST], 49) == 0  # not worth its fixed costs
    assert next_round(1e6, 170, [FIRST], 0) == 0


def test_growth_is_limited():
    assert next_round(1e6, 170, [FIRST]) == 1600


def test_the_reserve_for_bench_is_limited():
    assert reserved_for_bench(600) == pytest.approx(180)
    assert reserved_for_bench(3600) == reserved_for_bench(36000) == MAX_RESERVED


def test_a_small_budget_measures_once():
    assert [bench_rounds(60 * minutes) for minutes in (5, 14, 15, 60)] == [1, 1, 2, 2]
