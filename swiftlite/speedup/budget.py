"""Decide how many prompts the next round answers and trains on, from the time that the previous rounds took."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

BENCH_SHARE = 0.3
"""Share of the budget that is reserved for `bench`."""
LARGEST_GROWTH = 8
"""Maximum growth from one round to the next; measured times say little about much larger rounds."""
SMALLEST_GROWTH = 0.5
"""Minimum number of prompts of a round, relative to the previous round; a smaller round is not worth its fixed
costs."""


@dataclass(frozen=True)
class RoundTimes:
    """The size of a round and its times in seconds.

    Attributes:
        prompts: number of prompts.
        answers: time to write and answer the prompts.
        training: time to train on the answers of this round and all previous ones.
        fixed: time of export and evaluation, which does not depend on the number of prompts.
    """

    prompts: int
    answers: float
    training: float
    fixed: float


def first_round(budget: float) -> int:
    """Return the number of prompts of the first round, which also shows how fast the machine is."""
    return 256 if budget >= 1800 else 128


def next_round(budget: float, spent: float, rounds: Sequence[RoundTimes]) -> int:
    """Return the number of prompts of the next round; 0 if the rest of the budget does not suffice for one.

    Times are extrapolated from the last round: answers by its number of prompts N, training by the number of all
    prompts M, because a round trains on the answers of all rounds. With a(n) = A n / N, t(n) = T (M + n) / M, and a
    remainder R without the fixed costs, the largest n with a(n) + t(n) <= R is (R - T) / (A / N + T / M).

    Args:
        budget: seconds for everything.
        spent: seconds so far.
    """
    last = rounds[-1]
    total = sum(each.prompts for each in rounds)
    remainder = (1 - BENCH_SHARE) * budget - spent - last.fixed
    prompts = (remainder - last.training) / (last.answers / last.prompts + last.training / total)
    if prompts < SMALLEST_GROWTH * last.prompts:
        return 0
    return math.floor(min(prompts, LARGEST_GROWTH * last.prompts))
