"""acceptance.json: the share of drafts that is accepted, before and after a run, and by the engines that served it.
Beside it drafts.json: some held-out answers with who wrote each token, for people to look at.

This module is the only one that reads and writes these files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.durable import write_durably
from swiftlite.errors import UserError
from swiftlite.json_file import read_json

ACCEPTANCE_FILE = "acceptance.json"
ANSWERS_FILE = "drafts.json"
AT_TEMPERATURE = "_at_temperature_"
"""Between an engine's name and the temperature, above 0, at which it answered."""


@dataclass(frozen=True)
class MeasuredPrompts:
    """What was counted on so many prompts."""

    num_prompts: int
    counts: DraftCounts

    def to_json(self) -> dict[str, object]:
        return {"prompts": self.num_prompts, **self.counts.to_json()}


def add_run_acceptance(
    path: Path,
    when: Literal["before", "after"],
    acceptance_per_depth: Sequence[float],
    generated: MeasuredPrompts,
    by_channel: Mapping[str, MeasuredPrompts] | None = None,
) -> None:
    """Put what a run has measured into its file. "before" begins the file anew.

    Args:
        acceptance_per_depth: teacher-forced, over the held-out rows.
        generated: what an engine would have counted on held-out prompts, continued greedily.
        by_channel: the same for the prompts of each channel that has a name.
    """
    content: dict[str, Any] = {"depths": len(acceptance_per_depth)}
    if when == "after" and path.exists():
        content = json.loads(path.read_text())
    content[when] = {
        "teacher_forced": {"acceptance_per_depth": list(acceptance_per_depth)},
        "generated": generated.to_json(),
    }
    if by_channel:
        channels = sorted(by_channel)
        content[when]["generated_by_channel"] = {name: by_channel[name].to_json() for name in channels}
    _write(path, content)


def add_run_answers(path: Path, when: Literal["before", "after"], answers: Sequence[Mapping[str, Any]]) -> None:
    """Put answers into the file beside acceptance.json. "before" begins the file anew.

    Args:
        path: of acceptance.json.
        answers: `prompt`, `channel` and `tokens` (`answers.describe`) of each.
    """
    content = read_answers(path.parent) if when == "after" else {}
    content[when] = list(answers)
    lines = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    write_durably(path.with_name(ANSWERS_FILE), lines.encode(errors="replace") + b"\n")


def read_answers(run: Path) -> dict[str, Any]:
    """By "before" and "after" the answers that a run has kept; nothing where there is no such file, or a damaged one:
    they are for looking at alone.
    """
    try:
        content = read_json(run / ANSWERS_FILE)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_summary(path: Path) -> dict[str, float]:
    """The shares of drafted tokens that a run's model accepted, by names for metrics."""
    content = read_acceptance(path)
    return {
        f"acceptance_{when}": content[when]["generated"]["acceptance_rate"]
        for when in ("before", "after")
        if when in content
    }


def named(backend: str, temperature: float) -> str:
    """What an engine's counts at a temperature are called in files; greedily that is its name."""
    return f"{backend}{AT_TEMPERATURE}{temperature:g}" if temperature else backend


def in_words(name: str) -> str:
    """The same for readers."""
    return name.replace(AT_TEMPERATURE, " at temperature ")


def add_engine_acceptance(
    path: Path, backend: str, num_prompts: int, counts: DraftCounts, temperature: float = 0.0
) -> None:
    """Put an engine's counts into a run's file, beside the run's own and those at other temperatures.

    Raises:
        UserError: it is not such a file.
    """
    content = read_acceptance(path)
    content.setdefault("engines", {})[named(backend, temperature)] = MeasuredPrompts(num_prompts, counts).to_json()
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


_GIVE_IT = "give --acceptance_json the file in the --output_dir of a training run"


def _write(path: Path, content: dict[str, Any]) -> None:
    write_durably(path, json.dumps(content, indent=2).encode() + b"\n")
