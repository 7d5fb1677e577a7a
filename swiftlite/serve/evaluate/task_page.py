"""Make the table and the page of `evaluate --tasks`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftlite.report.figure import Bars, draw_bars
from swiftlite.report.page import Page, Section, Table, Tile
from swiftlite.serve.evaluate.task_results import Score, TaskRun

COLUMNS = [
    *("task", "of", "metric", "score", "change", "equal answers"),
    *("accepted by position", "tokens/step", "tokens/s", "without drafts"),
]
MEANING = (
    "score: with its standard error. change: from the baseline; (<2se): below two standard errors of the difference, "
    "not significant. equal answers: share of answers that are equal with and without drafts. tokens/s: of a request, "
    "from its arrival to its end; only of tasks whose answers are generated."
)


@dataclass(frozen=True)
class Compared:
    """The results of one task for one model.

    Attributes:
        name: "model" or "baseline".
        with_drafts, without_drafts: None if not measured; at least one is.
        baseline: the task with the baseline; None for the baseline itself, or without one.
    """

    task: str
    name: str
    with_drafts: TaskRun | None
    without_drafts: TaskRun | None
    baseline: TaskRun | None = None

    @property
    def run(self) -> TaskRun:
        """The run whose scores are shown."""
        found = self.with_drafts or self.without_drafts
        assert found is not None
        return found

    @property
    def equal_share(self) -> float | None:
        """Share of answers that are equal with and without drafts."""
        if self.with_drafts is None or self.without_drafts is None:
            return None
        return self.with_drafts.equal_share(self.without_drafts)

    @property
    def accepted(self) -> Sequence[float]:
        """Share of accepted drafts by position; empty without drafts."""
        counts = self.with_drafts.counts if self.with_drafts else None
        if counts is None or not counts.drafts:
            return ()
        return [number / counts.drafts for number in counts.accepted_per_position]

    def score_of_baseline(self, score: Score) -> Score | None:
        """Return the score of the baseline with the same metric."""
        found = self.baseline.scores() if self.baseline else []
        return next((other for other in found if (other.task, other.metric) == (score.task, score.metric)), None)

    def to_json(self) -> dict[str, Any]:
        """Return the results in the format of evaluation.json."""
        found: dict[str, Any] = {}
        if self.with_drafts:
            found["with_drafts"] = self.with_drafts.to_json()
        if self.without_drafts:
            found["without_drafts"] = self.without_drafts.to_json()
        if self.with_drafts and self.without_drafts:
            found["equal_answers"] = self.equal_share
        if self.baseline:
            found["change"] = [self._change(score) for score in self.run.scores()]
            found["equal_answers_of_baseline"] = self.run.equal_share(self.baseline)
        return found

    def _change(self, score: Score) -> dict[str, Any]:
        change = {"task": score.task, "metric": score.metric, "difference": None, "below_two_standard_errors": None}
        if before := self.score_of_baseline(score):
            difference, is_small = score.difference(before)
            change |= {"difference": difference, "below_two_standard_errors": is_small}
        return change


def task_table(compared: Sequence[Compared]) -> Table:
    """Return a table with a line for each score; acceptance and speed are in the first line of a task and model."""
    rows = []
    for each in compared:
        rest = _speed_cells(each)
        for score in each.run.scores():
            rows.append([score.task, each.name, score.metric, _score_cell(score), _change_cell(each, score), *rest])
            rest = [""] * len(rest)
    return Table("Quality, acceptance and speed", COLUMNS, rows)


def _score_cell(score: Score) -> str:
    if score.stderr is None:
        return f"{score.value:.4f}"
    return f"{score.value:.4f} ± {score.stderr:.4f}"


def _change_cell(compared: Compared, score: Score) -> str:
    before = compared.score_of_baseline(score)
    if before is None:
        return "-"
    difference, is_small = score.difference(before)
    return f"{difference:+.4f}" + (" (<2se)" if is_small else "")


def _speed_cells(compared: Compared) -> list[str]:
    with_drafts = without = per_step = None
    if compared.with_drafts:
        with_drafts = compared.with_drafts.tokens_per_second
    if compared.without_drafts:
        without = compared.without_drafts.tokens_per_second
    if compared.accepted:
        per_step = 1 + sum(compared.accepted)
    accepted = ", ".join(map(_percent, compared.accepted)) or "-"
    return [_percent(compared.equal_share), accepted, *map(_decimal, (per_step, with_drafts, without))]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def task_page(compared: Sequence[Compared], names: Mapping[str, str]) -> Page:
    """Return the page.

    Args:
        names: names or paths of the models, by "model" and "baseline".
    """
    tiles = []
    for each in compared:
        if each.name == "model":
            score = each.run.scores()[0]
            tiles.append(Tile(f"{each.task}: {score.metric}", _score_cell(score), _change_cell(each, score)))
    figures = []
    tasks = [each.task for each in compared if each.name == "model"]
    depth = max(len(each.accepted) for each in compared)
    for place in range(depth):
        bars = [Bars(name, [_at(compared, task, name, place) for task in tasks]) for name in names]
        title = f"Accepted drafts at position {place + 1}"
        figures.append(draw_bars(f"accepted-{place + 1}", title, tasks, bars, what="task", y="accepted"))
    lead = f"Tasks of lm-evaluation-harness with {names['model']}"
    if "baseline" in names:
        lead += f", compared with {names['baseline']}"
    section = Section("Tasks", MEANING, figures=figures, tables=[task_table(compared)])
    return Page("Evaluation with tasks", f"{lead}.", tiles, [section])


def _at(compared: Sequence[Compared], task: str, name: str, place: int) -> float | None:
    found = next(each for each in compared if (each.task, each.name) == (task, name))
    return found.accepted[place] if place < len(found.accepted) else None
