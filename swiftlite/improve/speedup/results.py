"""Read the results of `megatron sft` and `bench`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json

Result = TypeVar("Result")
When = Literal["before", "after"]
ALL = "all"


def read_result(path: Path, read: Callable[[Any], Result]) -> Result:
    """Return the result of `read` for the parsed content of a JSON file.

    Raises:
        UserError: the file is damaged.
    """
    try:
        return read(read_json(path))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        raise UserError(f"{path} is damaged", "delete it and run the same command again") from None


def accepted_drafts(acceptance: Any, when: When) -> dict[str, list[float]]:
    """Return the share of accepted drafts at each draft position, by channel; under "all" over all prompts.

    Args:
        acceptance: content of acceptance.json of a run.
        when: whether to read the counts before or after training.
    """
    measured = acceptance[when]
    by_channel = {ALL: measured["generated"], **measured.get("generated_by_channel", {})}
    shares = {}
    for channel, figures in by_channel.items():
        shares[channel] = [float(share) for share in figures["acceptance_per_position"]]
    return shares


def seconds_of_steps(report: Any) -> float | None:
    """Return the seconds of the training steps in a run_report.json; None if the run was resumed, because they are then
    only those of its last part.
    """
    if report["resumed_from"]:
        return None
    return float(report["seconds"])


def concurrency_of(bench: Any) -> list[int]:
    """Return the numbers of concurrent requests of a bench.json."""
    return [choice["concurrency"] for choice in bench["recommendations"]]
