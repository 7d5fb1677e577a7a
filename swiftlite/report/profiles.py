"""Read the tables of `OUTPUT_DIR/profile`, which `--profile_steps` writes."""

from pathlib import Path
from typing import Any

from swiftlite.acceptance.report import read_displayed

FOLDER = "profile"
TABLE_SUFFIX = ".operators.json"
_KEYS = {"steps", "rank", "device", "trace", "operators"}


def read_profiles(run: Path) -> list[dict[str, Any]]:
    """Return the tables of a run's profiles, in the order of their files; damaged files cause a warning."""
    paths = sorted((run / FOLDER).glob(f"[!.]*{TABLE_SUFFIX}"))
    return list(filter(None, (read_displayed(path, _KEYS) for path in paths)))
