"""Compute the results of `bench`: figures of rounds, and the recommended number of draft tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.engines.client import Answer

# Percentiles of slow rounds with drafts and of fast rounds without drafts, which are compared. With 5 rounds of equal
# servers, normal noise and 3 numbers of draft tokens, 1 of 110 runs reports a gain (with quartiles, 1 of 7). If the
# real gain is 3 times the noise, 13 % of runs miss it (45 % with the strictest rule, no overlap).
SLOW_END, FAST_END = 10, 90


@dataclass(frozen=True)
class Round:
    """One answer to every prompt.

    Attributes:
        seconds: time in which the server answered, from the first request to the end of the last answer, without the
            turns of other servers.
    """

    answers: list[Answer]
    seconds: float

    def __add__(self, other: "Round") -> "Round":
        """Return both parts of a round, which were measured one after the other."""
        return Round([*self.answers, *other.answers], self.seconds + other.seconds)

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.num_tokens for answer in self.answers) / self.seconds


@dataclass(frozen=True)
class ConcurrencyResult:
    """The measurement of one server at one concurrency.

    Attributes:
        counts: counts of drafts in all rounds; None without drafts.
        cached_share: share of the prompts' tokens in all rounds that were found in the prefix cache.
    """

    concurrency: int
    rounds: list[Round]
    counts: DraftCounts | None
    cached_share: float

    @property
    def mean_accepted_length(self) -> float:
        """Mean number of tokens that a step generates, including accepted draft tokens."""
        if self.counts is None:
            return 1.0
        answers = list(chain.from_iterable(each.answers for each in self.rounds))
        # `counts.drafts` omits steps in which the text had no match and nothing was drafted. The first token of an
        # answer is that of its prompt.
        tokens_of_steps = sum(answer.num_tokens for answer in answers) - len(answers)
        steps = max(self.counts.drafts, tokens_of_steps - self.counts.accepted, 1)
        return 1 + self.counts.accepted / steps

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each round."""
        return [each.tokens_per_second for each in self.rounds]

    def num_equal(self, expected: Sequence[Answer]) -> int:
        """Count the prompts with the expected answer in every round."""
        count = 0
        for number, want in enumerate(expected):
            found = [each.answers[number] for each in self.rounds]
            count += all((answer.text, answer.num_tokens) == (want.text, want.num_tokens) for answer in found)
        return count

    def to_json(self, expected: Sequence[Answer] | None) -> dict[str, Any]:
        """Return the result in the format of bench.json.

        Args:
            expected: answers without drafts; None for sampled answers.
        """
        num_equal = drafts = None
        if expected is not None:
            num_equal = self.num_equal(expected)
        if self.counts:
            drafts = self.counts.to_json()
        answers = list(chain.from_iterable(each.answers for each in self.rounds))
        per_token = [answer.seconds_per_token for answer in answers]
        return {
            "concurrency": self.concurrency,
            "tokens_per_second": float(np.median(self.speeds)),
            "tokens_per_second_of_rounds": self.speeds,
            "time_to_first_token_ms": _spread([answer.seconds_to_first for answer in answers]),
            "time_per_token_ms": _spread([value for value in per_token if value is not None]),
            "tokens_per_round": sum(answer.num_tokens for answer in self.rounds[0].answers),
            "answers_equal": num_equal,
            "cached_share_of_prompts": self.cached_share,
            "mean_accepted_length": self.mean_accepted_length,
            "drafts": drafts,
        }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return the median (p50) and the 90th percentile (p90) of the requests' seconds, in milliseconds; None without
    requests.
    """
    if not seconds:
        return None
    p50, p90 = np.percentile(seconds, [50, 90])
    return {"p50": 1000 * float(p50), "p90": 1000 * float(p90)}


@dataclass(frozen=True)
class Choice:
    """The recommended number of draft tokens at one concurrency.

    Attributes:
        ratios: for each number of draft tokens above 0, the median of tokens per second, divided by the median of the
            faster of the two measurements without drafts.
        drift: relative change of speed of the server without drafts from its first to its last measurement.
        reason: why this number is recommended, in one sentence.
    """

    num_speculative_tokens: int
    ratios: dict[int, float]
    drift: float
    reason: str


def choose(
    first: Sequence[float],
    speeds: Mapping[int, Sequence[float]],
    last: Sequence[float],
    lengths: Mapping[int, float],
) -> Choice:
    """Return the fastest number of draft tokens if it is reliably faster than no drafts; otherwise 0.

    Args:
        first, last: tokens per second of the rounds without drafts, measured before and after all other servers. The
            difference between `first` and `last` shows the noise of the machine.
        speeds: tokens per second of the rounds, for each number of draft tokens above 0.
        lengths: mean accepted length, for each number of draft tokens. A step that verifies drafts takes at least as
            long as a step without drafts, so the mean accepted length is the maximum speedup; a larger speedup is
            noise.
    """
    limit = np.percentile([*first, *last], FAST_END)
    middle = max(np.median(first), np.median(last))
    ratios = {k: float(np.median(each) / middle) for k, each in speeds.items()}
    drift = float(np.median(last) / np.median(first)) - 1
    surely = []
    for k, each in speeds.items():
        slow = min(np.percentile(each, SLOW_END), lengths[k] * middle)
        if slow > limit:
            surely.append(k)
    best = max(ratios, key=ratios.__getitem__)
    if surely:
        chosen = max(surely, key=ratios.__getitem__)
        return Choice(chosen, ratios, drift, f"{ratios[chosen]:.2f}x the tokens/s without drafts")
    if ratios[best] > lengths[best]:
        reason = (
            f"{best} was {ratios[best]:.2f}x, which exceeds its {lengths[best]:.2f} tokens per step: the load of the "
            "machine changed"
        )
    elif ratios[best] > 1:
        reason = f"{best} would be {ratios[best]:.2f}x, which is within the noise of rounds"
    else:
        reason = f"drafts are slower, {ratios[best]:.2f}x at best"
    return Choice(0, ratios, drift, reason)
