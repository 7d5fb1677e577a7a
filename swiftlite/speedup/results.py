"""Read the results of `evaluate` and `bench`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from swiftlite.errors import UserError
from swiftlite.json_file import read_json

Result = TypeVar("Result")


def read_result(path: Path, read: Callable[[Any], Result]) -> Result:
    """Return the result of `read` for the parsed content of a JSON file.

    Raises:
        UserError: the file is damaged.
    """
    try:
        return read(read_json(path))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        raise UserError(f"{path} is damaged", "delete it and run the same command again") from None


def accepted_drafts(evaluation: Any, backend: str) -> dict[str, list[float]]:
    """Return the share of accepted drafts at each draft position, by channel.

    Args:
        evaluation: content of evaluation.json.
        backend: engine that counted the drafts.
    """
    by_channel = {}
    for channel, figures in evaluation["model"][backend].items():
        by_channel[channel] = [float(share) for share in figures["acceptance_per_position"]]
    return by_channel


def concurrency_of(bench: Any) -> list[int]:
    """Return the numbers of concurrent requests of a bench.json."""
    return [choice["concurrency"] for choice in bench["recommendations"]]
