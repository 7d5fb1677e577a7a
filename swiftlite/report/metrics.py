"""metrics.jsonl, read back: an object per line, some of which a killed process or a full disk has damaged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftlite.json_file import parse_json

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
    """The lines of a run that are whole; none if it has no such file."""
    path = run / METRICS_FILE
    if not path.is_file():
        return []
    found = map(metrics_of, path.read_bytes().splitlines())
    return [metrics for metrics in found if metrics is not None]


def curve(metrics: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """The steps that have a number of that name, with it."""
    return [(line["step"], line[name]) for line in metrics if isinstance(line.get(name), int | float)]
