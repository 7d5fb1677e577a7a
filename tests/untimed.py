"""Compare metrics of runs, which differ in their times and speeds."""

from collections.abc import Mapping
from typing import Any


def untimed(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that do not depend on the clock or the machine."""
    suffixes = ("per_second", "_gb", "mfu")
    return {name: metrics[name] for name in metrics if not name.startswith("time/") and not name.endswith(suffixes)}
