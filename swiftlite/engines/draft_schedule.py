"""A draft schedule maps the number of in-flight requests to a number of draft tokens.

`bench` measures the best schedule, and `deploy` starts servers with it. Drafting speeds up generation only if the
machine has unused compute. The best number of draft tokens therefore depends on the number of requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json

MEASURE = "run swiftlite bench again and give its bench.json"


@dataclass(frozen=True)
class DraftSchedule:
    """The number of tokens to draft per step, for each range of in-flight requests.

    Attributes:
        numbers: maps the minimum number of requests of each range to the number of draft tokens. The first minimum is
            1. For example {1: 3, 8: 1, 32: 0}: 3 tokens for 1 to 7 requests, 1 token for 8 to 31, none for 32 and more.
    """

    numbers: Mapping[int, int]

    @property
    def largest(self) -> int:
        """Largest number of draft tokens per step."""
        return max(self.numbers.values())

    @property
    def is_constant(self) -> bool:
        """Whether the number of draft tokens is the same for every number of in-flight requests."""
        return len(set(self.numbers.values())) == 1


def schedule_of(chosen: Mapping[int, int]) -> DraftSchedule:
    """Build the schedule from the best number of draft tokens at each measured concurrency.

    A number of draft tokens applies from its concurrency up to the next measured one; the first number also applies
    below its concurrency. Consecutive equal numbers are merged.

    Args:
        chosen: best number of draft tokens, by concurrency.
    """
    numbers: dict[int, int] = {}
    latest = None
    begin = 1
    for concurrency, number in sorted(chosen.items()):
        if numbers:
            begin = concurrency
        if number != latest:
            numbers[begin] = number
        latest = number
    return DraftSchedule(numbers)


def read_schedule(path: Path, backend: str) -> DraftSchedule:
    """Read the schedule from a bench.json.

    Raises:
        UserError: the file is invalid, incomplete, or was measured with another engine than `backend`.
    """
    try:
        report = read_json(path)
        engine = report["options"]["infer_backend"]
        chosen = _chosen(report["recommendations"])
    except OSError as error:
        raise UserError(f"--draft_schedule {path} cannot be read: {error.strerror}", MEASURE) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--draft_schedule {path} is not a bench.json", MEASURE) from None
    if not chosen:
        raise UserError(f"--draft_schedule {path} is incomplete: the measurement was interrupted", MEASURE)
    if engine != backend:
        raise UserError(
            f"--draft_schedule {path} was measured with --infer_backend {engine}, not {backend}",
            f"measure again: swiftlite bench --infer_backend {backend}",
        )
    return schedule_of(chosen)


def _chosen(recommendations: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return the best number of draft tokens by concurrency, from the recommendations in a bench.json.

    Raises:
        KeyError, TypeError, ValueError: the content does not have the format of bench.json.
    """
    chosen = {}
    for each in recommendations:
        concurrency, number = each["concurrency"], each["num_speculative_tokens"]
        # Not isinstance, for which true and false in JSON are integers.
        if type(concurrency) is not int or type(number) is not int or concurrency < 1 or number < 0:
            raise ValueError
        chosen[concurrency] = number
    return chosen
