"""Compute the number of prompts of the next training round from the durations of the previous rounds."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_FOR_TWO = 45 * 60.0
"""Seconds of the smallest budget with which two drafters are trained and compared."""
CANDIDATE_COST = 2.4
"""Ratio of the training time of the other drafter to that of MTP heads, on the same answers. With
SmolLM2-135M-Instruct on two cores, three epochs over 27,000 tokens took 142 s and 60 s."""
BENCH_SHARE = 0.3
"""Share of the budget that is reserved for `bench`, up to `MAX_RESERVED`."""
MAX_RESERVED = 480.0
"""Maximum of seconds that are reserved for `bench`. Within an hour it took four minutes with SmolLM2-135M-Instruct on
two cores; longer measurements only add requests."""
FIRST_ROUND_SHARE = 0.45
"""Share of the budget that is left after the preparation, for the answers and the training of the first round, without
the starts of programs."""
SMALLEST_ROUND = 64
"""Minimum number of prompts of the first round. Some answers are unusable, and 48 are required."""
PRODUCTS = 20
"""Number of matrix products whose time is measured; a fraction of a second on a laptop."""
PASSES = 6.6
"""A prompt takes as long as this number of passes of the model over a longest answer at the speed of large matrix
products. With SmolLM2-135M-Instruct on two idle cores without AVX-512, a pass took 0.20 to 0.24 s, and writing and
answering 170 prompts and fitting heads to them 1.4 s per prompt, without the starts of programs: 6 to 7 passes. On two
idle cores with AVX-512 it was 4.8 passes."""
STARTS = 60.0
"""Seconds for the starts of servers."""
START_OF_OTHER = 30.0
"""Seconds for the start of an engine that is only compared."""
MEASURED_SHARE = 0.7
"""Ratio of the seconds that `bench` is given to those that it may take. It completes the requests that it started."""
MIN_BENCH = 60.0
"""Minimum of seconds for the measurements of `bench`."""
TRAINING_PER_ANSWERS = 1.5
"""Ratio of the time of three epochs to that of the answers of a first round, with the start of the engine, whose heads
are only fitted. On two cores without AVX-512, an hour spent 1,636 s on training and 1,131 s on answers; on two cores
with instructions for bfloat16, three epochs took 0.40 s per prompt, and the answers of the first round 0.25 s."""
LARGEST_GROWTH = 16
"""Maximum ratio of the prompts of a round to those of the previous one. Times cannot be extrapolated to much larger
rounds."""
SMALLEST_GROWTH = 0.5
"""Minimum ratio of the prompts of a round to those of the previous one. A smaller round is not worth its fixed
costs."""


@dataclass(frozen=True)
class RoundTimes:
    """The size of a round and its times in seconds.

    Attributes:
        prompts: number of prompts.
        answers: time to write and answer the prompts.
        training: time to train on the answers of this round and all previous ones, without what is in `fixed`.
        fixed: time that does not depend on the number of prompts: the start of the training, its measurements of
            acceptance, and the export.
    """

    prompts: int
    answers: float
    training: float
    fixed: float


def reserved_for_bench(budget: float) -> float:
    """Return the seconds of the budget that rounds leave for `bench`."""
    return min(BENCH_SHARE * budget, MAX_RESERVED)


def candidate_seconds(rounds: Sequence[RoundTimes]) -> float:
    """Return the seconds for training and exporting the other drafter, on the answers of all rounds."""
    return CANDIDATE_COST * rounds[-1].training + rounds[-1].fixed


def bench_rounds(budget: float) -> int:
    """Return how often `bench` sends every prompt; more rounds separate small gains from noise.

    Args:
        budget: seconds of the whole command.
    """
    return 1 if budget < 900 else 2


def bench_seconds(budget: float, spent: float, later: float = 0.0, number: int = 1) -> float:
    """Return the seconds for the measurements of `bench`.

    Args:
        spent: seconds so far.
        later: seconds for the other steps after it.
        number: how often `bench` still runs, each time for as long.
    """
    return max(MEASURED_SHARE * ((budget - spent - later) / number - STARTS), MIN_BENCH)


def other_seconds(budget: float) -> float:
    """Return the seconds for the measurements of an engine that is only compared."""
    return min(0.03 * budget, 30.0)


def first_round(
    budget: float, largest: int | None = None, seconds_per_prompt: float = 0.0, *, spent: float = 0.0
) -> int:
    """Return the number of prompts of the first round. Its duration also shows how fast the machine is.

    Args:
        budget: seconds of the whole command.
        largest: maximum number of prompts; None if it is not limited.
        seconds_per_prompt: estimated time for answers and training.
        spent: seconds so far.
    """
    prompts = 256 if budget >= 1800 else 192
    affordable = math.floor(FIRST_ROUND_SHARE * (budget - spent) / max(seconds_per_prompt, 1e-6))
    prompts = min(prompts, max(affordable, SMALLEST_ROUND))
    if largest is None:
        return prompts
    return min(prompts, largest)


def seconds_per_prompt(num_parameters: int, num_tokens: int) -> float:
    """Estimate the seconds of this machine's processor for a prompt of the first round, from a short measurement while
    other programs may use the processor as well.

    Args:
        num_parameters: parameters of the model.
        num_tokens: maximum tokens of an answer.
    """
    matrix = np.ones((1024, 1024), np.float32)
    np.matmul(matrix, matrix)  # starts the threads
    seconds = []
    for _ in range(PRODUCTS):
        start = time.perf_counter()
        np.matmul(matrix, matrix)
        seconds.append(time.perf_counter() - start)
    per_second = 2 * matrix.size * len(matrix) / statistics.median(seconds)
    return PASSES * 2 * num_parameters * num_tokens / per_second


def next_round(
    budget: float, spent: float, rounds: Sequence[RoundTimes], largest: int | None = None, *, compares: bool = False
) -> int:
    """Return the number of prompts of the next round; 0 if the rest of the budget is too small for a round.

    Times are extrapolated from the last round, which answered N prompts in A seconds and trained in T seconds on the M
    prompts of all rounds so far. A next round of n prompts needs A n / N seconds for answers and T (M + n) / M for
    training. If R seconds of the budget remain after the fixed costs, the largest possible n is (R - T) / (A / N + T /
    M). If another drafter is trained on the same prompts afterwards, T includes its training.

    Args:
        budget: seconds of the whole command, including the final benchmark.
        spent: seconds so far.
        largest: maximum number of prompts; None if it is not limited.
        compares: whether two drafters are compared.
    """
    last = rounds[-1]
    total = sum(each.prompts for each in rounds)
    remainder, training = budget - reserved_for_bench(budget) - spent - last.fixed, last.training
    if compares:
        remainder -= last.fixed + STARTS + MIN_BENCH
        training *= 1 + CANDIDATE_COST
    prompts = (remainder - training) / (last.answers / last.prompts + training / total)
    if largest is not None:
        prompts = min(prompts, largest)
    if prompts < SMALLEST_GROWTH * last.prompts:
        return 0
    return math.floor(min(prompts, LARGEST_GROWTH * last.prompts))
