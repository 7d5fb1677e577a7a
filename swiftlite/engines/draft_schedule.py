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

MEASURE = "measure again with swiftlite bench, and give the bench.json that it writes"


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
        """The most tokens that are ever drafted."""
        return max(self.numbers.values())

    @property
    def is_constant(self) -> bool:
        """Whether the load changes nothing."""
        return len(set(self.numbers.values())) == 1


def schedule_of(chosen: Mapping[int, int]) -> DraftSchedule:
    """The schedule that follows from the numbers chosen at some concurrencies.

    Each holds up to the next concurrency that was measured, the first one below it too. Equal neighbours are one.
    """
    numbers: dict[int, int] = {}
    latest = None
    for concurrency, number in sorted(chosen.items()):
        if number != latest:
            numbers[concurrency if numbers else 1] = number
        latest = number
    return DraftSchedule(numbers)


def read_schedule(path: Path, backend: str) -> DraftSchedule:
    """The schedule that follows from a bench.json.

    Raises:
        UserError: it is none, is not complete, or has measured another engine than `backend`.
    """
    try:
        report = read_json(path)
        engine = report["options"]["infer_backend"]
        chosen = _chosen(report["recommendations"])
    except OSError as error:
        raise UserError(f"--draft_schedule {path} cannot be read: {error.strerror}", MEASURE) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--draft_schedule {path} is no bench.json", MEASURE) from None
    if not chosen:
        raise UserError(f"--draft_schedule {path}: this measurement was cut short", MEASURE)
    if engine != backend:
        raise UserError(
            f"--draft_schedule {path} was measured with --infer_backend {engine}, and {backend} is asked for",
            "measure the engine that will serve: another spends other time on a draft",
        )
    return schedule_of(chosen)


def _chosen(recommendations: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Concurrency -> number of tokens.

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
