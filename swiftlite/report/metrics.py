"""Read metrics.jsonl, which has one JSON object per line. A killed process or a full disk may leave damaged lines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftlite.base.json_file import parse_json
from swiftlite.base.log import logger
from swiftlite.runtime.decisions import DECISION, METRICS_FILE

LOST_SECONDS = "restart/lost_seconds"
"""Metric: time from the last step before a failure to the start of the next new step, in seconds."""
REPEATED_STEPS = "restart/repeated_steps"
"""Metric: number of steps that were computed twice because of a failure."""
NUM_RESTARTS = "restart/number"
"""Metric: number of restarts of the run so far."""


def metrics_of(line: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics; None if the line is damaged, such as an incomplete line of a killed process, or only
    zeros.
    """
    try:
        content = parse_json(line.decode())
    except ValueError:  # UnicodeDecodeError is one
        return None
    if not isinstance(content, dict) or not isinstance(content.get("step"), int):
        return None
    return content


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the valid lines of a run's metrics.jsonl; empty if the file does not exist.

    Invalid lines cause a warning.
    """
    path = run / METRICS_FILE
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines()
    found = [metrics for metrics in map(metrics_of, lines) if metrics is not None]
    if len(found) < len(lines):
        logger.warning("%s: ignoring %d damaged lines of %d", path, len(lines) - len(found), len(lines))
    return found


def evaluations_in(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the metrics of evaluations."""
    return [line for line in metrics if any(name.startswith("eval_") for name in line)]


def restarts_in(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return what each failure cost a run with --max_restarts: the last step before the failure, and the metrics."""
    return [line for line in metrics if LOST_SECONDS in line]


def decisions_in(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return what the program decided after faults (`record_decision`)."""
    return [line for line in metrics if DECISION in line]


def curve(metrics: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return (step, value) of a metric for all steps that have this metric."""
    return [(line["step"], line[name]) for line in metrics if isinstance(line.get(name), int | float)]
