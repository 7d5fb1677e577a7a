"""Read the files in a training run's output_dir for a page.

Missing files count as empty. Damaged files also count as empty, and cause a warning.
"""

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from swiftlite.acceptance.report import ACCEPTANCE_FILE, read_acceptance, read_answers, read_displayed
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import parse_json
from swiftlite.base.log import logger
from swiftlite.base.redact import redact
from swiftlite.report.metrics import curve, read_metrics
from swiftlite.report.profiles import read_profiles

NUM_ROLLOUTS = 12
"""Number of completions that a page shows."""


@dataclass(frozen=True)
class RunFiles:
    """The files of a run.

    Attributes:
        name: name of the run's directory.
        options: args.json, without secrets.
        report: run_report.json; empty before the run is finished.
        acceptance: acceptance.json.
        answers: drafts.json.
        metrics: lines of metrics.jsonl.
        rollouts: the first completions of the last generation in `rollouts/`; empty for runs without rollouts.
        profiles: the tables of slowest operators in `profile/`; empty for runs that were not profiled.
    """

    name: str
    options: dict[str, Any]
    report: dict[str, Any]
    acceptance: dict[str, Any]
    answers: dict[str, Any]
    metrics: list[dict[str, Any]]
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl."""
        return max((line["step"] for line in self.metrics), default=0)

    def generated(self, when: str) -> dict[str, Any]:
        """Return the draft counts on held-out prompts "before" or "after" training; empty if they were not measured."""
        return self.acceptance.get(when, {}).get("generated", {})

    def last(self, name: str) -> float | None:
        """Return the last value of a metric; None without values."""
        points = curve(self.metrics, name)
        if not points:
            return None
        return points[-1][1]


def read_run(directory: Path) -> RunFiles:
    """Read the files of the run in a directory."""
    acceptance: dict[str, Any] = {}
    if (directory / ACCEPTANCE_FILE).exists():
        try:
            acceptance = read_acceptance(directory / ACCEPTANCE_FILE)
        except UserError as error:
            logger.warning("%s; omitted from the page", error.problem)
    return RunFiles(
        name=directory.absolute().name,
        options=redact(read_displayed(directory / "args.json")),
        report=read_displayed(directory / "run_report.json"),
        acceptance=acceptance,
        answers=read_answers(directory),
        metrics=read_metrics(directory),
        rollouts=_read_rollouts(directory / "rollouts"),
        profiles=read_profiles(directory),
    )


def _read_rollouts(directory: Path) -> list[dict[str, Any]]:
    """Return the first completions of the last generation."""
    files = sorted(directory.glob("*.jsonl"))
    if not files:
        return []
    try:
        with files[-1].open(encoding="utf-8") as file:
            lines = [parse_json(line) for line in islice(file, NUM_ROLLOUTS)]
        keys = {"prompt", "completion", "scores", "advantage"}
        return [line for line in lines if keys <= set(line)]
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s cannot be read: %s; omitted from the page", files[-1], error)
        return []
