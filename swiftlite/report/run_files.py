"""Read the files in a training run's output_dir for a page.

Missing files count as empty. Damaged files also count as empty, and cause a warning.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite.acceptance.report import ACCEPTANCE_FILE, read_acceptance, read_answers
from swiftlite.errors import UserError
from swiftlite.json_file import read_json
from swiftlite.log import logger
from swiftlite.redact import redact
from swiftlite.report.metrics import curve, read_metrics


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
    """

    name: str
    options: dict[str, Any]
    report: dict[str, Any]
    acceptance: dict[str, Any]
    answers: dict[str, Any]
    metrics: list[dict[str, Any]]

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
        options=redact(_read_object(directory / "args.json")),
        report=_read_object(directory / "run_report.json"),
        acceptance=acceptance,
        answers=read_answers(directory),
        metrics=read_metrics(directory),
    )


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = read_json(path)
    except (OSError, ValueError):
        content = None
    if isinstance(content, dict):
        return content
    logger.warning("%s is damaged; omitted from the page", path)
    return {}
