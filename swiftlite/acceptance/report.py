"""acceptance.json: the share of drafts that is accepted, before and after a run, and by the engines that served it.

This module is the only one that reads and writes the file.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.durable import write_durably
from swiftlite.errors import UserError
from swiftlite.json_file import read_json

ACCEPTANCE_FILE = "acceptance.json"


def add_run_acceptance(
    path: Path,
    when: Literal["before", "after"],
    acceptance_per_depth: Sequence[float],
    num_prompts: int,
    counts: DraftCounts,
) -> None:
    """Put what a run has measured into its file. "before" begins the file anew.

    Args:
        acceptance_per_depth: teacher-forced, over the held-out rows.
        num_prompts: held-out prompts that were continued greedily.
        counts: what an engine would have counted on these.
    """
    content: dict[str, Any] = {"depths": len(acceptance_per_depth)}
    if when == "after" and path.exists():
        content = json.loads(path.read_text())
    content[when] = {
        "teacher_forced": {"acceptance_per_depth": list(acceptance_per_depth)},
        "generated": {"prompts": num_prompts, **counts.to_json()},
    }
    _write(path, content)


def add_engine_acceptance(path: Path, backend: str, num_prompts: int, counts: DraftCounts) -> None:
    """Put an engine's counts into a run's file, beside the run's own.

    Raises:
        UserError: it is not such a file.
    """
    content = read_acceptance(path)
    content.setdefault("engines", {})[backend] = {"prompts": num_prompts, **counts.to_json()}
    _write(path, content)


def read_acceptance(path: Path) -> dict[str, Any]:
    """The content of a run's acceptance.json.

    Raises:
        UserError: it is not such a file.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", _GIVE_IT) from None
    if not isinstance(content, dict) or "depths" not in content:
        raise UserError(f"{path} is no acceptance.json", _GIVE_IT)
    return content


_GIVE_IT = "give --acceptance_json the file in the --output_dir of an sft run"


def _write(path: Path, content: dict[str, Any]) -> None:
    write_durably(path, json.dumps(content, indent=2).encode() + b"\n")
