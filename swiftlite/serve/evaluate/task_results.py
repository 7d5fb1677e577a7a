"""Read the results of lm-evaluation-harness for one task, and compare them."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.json_file import parse_json, read_json
from swiftlite.engines.server.metrics import Throughput

GENERATES = "generate_until"
"""Type of tasks whose answers are generated; those of other types are chosen by log-probability."""
_STANDARD_ERRORS = 2
"""Differences below this number of standard errors are not significant."""


@dataclass(frozen=True)
class Score:
    """One score of a task.

    Attributes:
        metric: name of the metric and, except for "none", of the filter that extracts the answer.
        stderr: standard error; None if lm-eval does not compute it.
    """

    task: str
    metric: str
    value: float
    stderr: float | None

    def difference(self, other: "Score") -> tuple[float, bool]:
        """Return the difference to another score, and whether it is below two standard errors of the difference."""
        difference = self.value - other.value
        if self.stderr is None or other.stderr is None:
            return difference, False
        limit = _STANDARD_ERRORS * math.hypot(self.stderr, other.stderr)
        return difference, abs(difference) < limit or not difference


@dataclass(frozen=True)
class TaskRun:
    """One task with the answers of one server.

    Attributes:
        lm_eval: the results of lm-eval: "results" and "groups" by the names of tasks, "n-samples" and "configs".
        counts: draft counts of the answers; None if the server does not draft.
        directory: directory with the files of lm-eval.
    """

    lm_eval: Mapping[str, Any]
    counts: DraftCounts | None
    throughput: Throughput
    directory: Path

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second of a request; None if no answer was generated."""
        if GENERATES not in self.output_types.values() or not self.throughput.seconds:
            return None
        return self.throughput.tokens / self.throughput.seconds

    @property
    def output_types(self) -> dict[str, str]:
        return {task: config["output_type"] for task, config in self.lm_eval["configs"].items()}

    @property
    def num_questions(self) -> int:
        return sum(each["effective"] for each in self.lm_eval["n-samples"].values())

    def scores(self) -> list[Score]:
        """Return the scores of the task; of a group with an aggregate, only those of the group."""
        found = []
        for task, metrics in (self.lm_eval.get("groups") or self.lm_eval["results"]).items():
            for key, value in metrics.items():
                name, comma, filtered_by = key.partition(",")
                if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                stderr = metrics.get(f"{name}_stderr,{filtered_by}")
                if not isinstance(stderr, int | float) or math.isnan(stderr):
                    stderr = None
                metric = name if filtered_by == "none" else f"{name}, {filtered_by}"
                found.append(Score(task, metric, float(value), stderr))
        return found

    def answers(self) -> dict[tuple[str, int], object]:
        """Return the answers by task and number of the question: texts, or the choice with the largest
        log-probability.
        """
        found: dict[tuple[str, int], object] = {}
        for path in self.directory.glob("*/samples_*.jsonl"):
            task = path.name.removeprefix("samples_").rpartition("_")[0]
            for line in path.read_text(encoding="utf-8").splitlines():
                sample = parse_json(line)
                found[task, sample["doc_id"]] = _answer(sample["resps"], self.output_types.get(task, GENERATES))
        return found

    def equal_share(self, other: Self) -> float:
        """Return the share of questions with the same answer in another run of the task."""
        mine, its = self.answers(), other.answers()
        return sum(its.get(key) == answer for key, answer in mine.items()) / max(len(mine), 1)

    def to_json(self) -> dict[str, Any]:
        """Return the run in the format of evaluation.json."""
        found: dict[str, Any] = {
            "questions": self.num_questions,
            "scores": [asdict(score) for score in self.scores()],
            "generated_tokens": self.throughput.tokens,
            "request_seconds": self.throughput.seconds,
            "tokens_per_second": self.tokens_per_second,
            "lm_eval": self.lm_eval,
        }
        if self.counts and self.counts.drafts:
            found["drafts"] = self.counts.to_json()
        return found


def _answer(responses: list[Any], output_type: str) -> object:
    """Return the answer to one question.

    Args:
        responses: for each request, the list of its responses: texts, or log-probability and whether it is the most
            likely continuation, as texts.
    """
    if output_type == "multiple_choice":
        log_p = [float(response[0][0]) for response in responses]
        return log_p.index(max(log_p))
    if output_type == "loglikelihood":
        return [response[0][1] for response in responses]
    return responses


def read_lm_eval(directory: Path) -> dict[str, Any]:
    """Return the results in the files that lm-eval wrote to a directory.

    Raises:
        ValueError: there are no results.
    """
    path = max(directory.glob("*/results_*.json"))
    found = read_json(path)
    return {
        key: found[key] for key in ("results", "groups", "n-samples", "n-shot", "versions", "configs") if key in found
    }


FINISHED = "finished.json"


def write_finished(run: TaskRun, settings: Mapping[str, Any]) -> bytes:
    """Return the content of finished.json, which marks a finished task."""
    counts = asdict(run.counts) if run.counts else None
    content = {"settings": settings, "counts": counts, "throughput": asdict(run.throughput), "lm_eval": run.lm_eval}
    return json.dumps(content, indent=2).encode() + b"\n"


def read_finished(directory: Path) -> tuple[TaskRun, dict[str, Any]]:
    """Return a finished task and its settings.

    Raises:
        OSError, ValueError, KeyError, TypeError: it is not finished, or its file is damaged.
    """
    content = read_json(directory / FINISHED)
    counts = content["counts"]
    if counts:
        counts = DraftCounts(counts["drafts"], counts["drafted"], tuple(counts["accepted_per_position"]))
    run = TaskRun(content["lm_eval"], counts, Throughput(**content["throughput"]), directory)
    return run, content["settings"]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of settings that differ."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield name
