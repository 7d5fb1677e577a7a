"""Read metrics.jsonl, which has one object per line; a killed process or a full disk may leave damaged lines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftlite.json_file import parse_json
from swiftlite.log import logger

METRICS_FILE = "metrics.jsonl"


def metrics_of(line: bytes) -> dict[str, Any] | None:
    """A line of metrics; None for what a killed process or a full disk leaves: half a line, zeros."""
    try:
        content = parse_json(line.decode())
    except ValueError:  # UnicodeDecodeError is one
        return None
    is_whole = isinstance(content, dict) and isinstance(content.get("step"), int)
    return content if is_whole else None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's metrics.jsonl, and warn of the others; none if there is no such file."""
    path = run / METRICS_FILE
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines()
    found = [metrics for metrics in map(metrics_of, lines) if metrics is not None]
    if len(found) < len(lines):
        logger.warning("%s: %d of %d lines are damaged and left out", path, len(lines) - len(found), len(lines))
    return found


def curve(metrics: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """The steps that have a number of that name, with it."""
    return [(line["step"], line[name]) for line in metrics if isinstance(line.get(name), int | float)]
