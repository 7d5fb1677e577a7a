"""Map the number of in-flight requests to a number of draft tokens; `bench` measures it and `deploy` starts servers
with it.

Drafting pays off while a machine has spare compute, so one number is not best for one request and for thirty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite.errors import UserError
from swiftlite.json_file import read_json

MEASURE = "run swiftlite bench again and give its bench.json"


@dataclass(frozen=True)
class DraftSchedule:
    """Numbers of tokens to draft per step.

    Attributes:
        numbers: from how many requests on, to the number. For example {1: 3, 8: 1, 32: 0}: 3 tokens for up to 7
            requests, 1 for up to 31, none for more. The first is from 1 on.
    """

    numbers: Mapping[int, int]

    @property
    def largest(self) -> int:
        """Largest number of draft tokens per step."""
        return max(self.numbers.values())

    @property
    def is_constant(self) -> bool:
        """Whether the number is the same at every load."""
        return len(set(self.numbers.values())) == 1


def schedule_of(chosen: Mapping[int, int]) -> DraftSchedule:
    """Build the schedule from the numbers chosen at the measured concurrencies.

    Each number applies up to the next measured concurrency, and the first one also below. Equal neighbors are merged.
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
    """Return the number of draft tokens by concurrency.

    Raises:
        KeyError, TypeError, ValueError: the file is something else.
    """
    chosen = {}
    for each in recommendations:
        concurrency, number = each["concurrency"], each["num_speculative_tokens"]
        if type(concurrency) is not int or type(number) is not int or concurrency < 1 or number < 0:
            raise ValueError
        chosen[concurrency] = number
    return chosen
