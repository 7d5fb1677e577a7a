"""Read the tables of `OUTPUT_DIR/profile`, which `--profile_steps` writes."""

from pathlib import Path
from typing import Any

from swiftlite.base.json_file import read_json
from swiftlite.base.log import logger

FOLDER = "profile"
TABLE_SUFFIX = ".operators.json"
_KEYS = {"steps", "rank", "device", "trace", "operators"}


def read_profiles(run: Path) -> list[dict[str, Any]]:
    """Return the tables of a run's profiles, in the order of their files; damaged files cause a warning."""
    found = []
    for path in sorted((run / FOLDER).glob(f"[!.]*{TABLE_SUFFIX}")):
        try:
            content = read_json(path)
        except (OSError, ValueError):
            content = None
        if isinstance(content, dict) and set(content) >= _KEYS:
            found.append(content)
        else:
            logger.warning("%s is damaged; omitted from the report", path)
    return found
