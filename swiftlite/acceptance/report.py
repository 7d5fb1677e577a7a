"""acceptance.json: the share of drafts that is accepted, before and after a run, and by the engines that served it.

This module is the only one that reads and writes the file.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.bridge.tensors import write_durably
from swiftlite.errors import UserError

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
    """The content of the file that --acceptance_json names.

    Raises:
        UserError: it is not such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--acceptance_json {path}: {error}", "give the acceptance.json of an sft run") from None
    if not isinstance(content, dict) or "depths" not in content:
        raise UserError(f"--acceptance_json {path} is no acceptance.json", "give the one in the sft run's --output_dir")
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    write_durably(path, json.dumps(content, indent=2).encode() + b"\n")
