"""Remember the evaluations of a run, and choose its best checkpoint (`--metric_for_best_model`).

    OUTPUT_DIR/best_checkpoint.json        one metric of all evaluations

The file is written before the checkpoint of an evaluated step. A run that resumes forgets later evaluations, so that it
decides as a run without an interruption. The checkpoint is chosen among those that exist: a step can be evaluated
without being saved.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from swiftlite.base.atomic import atomic_write
from swiftlite.base.json_file import read_json
from swiftlite.base.log import logger
from swiftlite.plan.facts import run_checkpoints

BEST_FILE = "best_checkpoint.json"


@dataclass(frozen=True)
class Evaluations:
    """The values of a metric, by step.

    Attributes:
        metric: name of the metric, such as `eval_loss`.
        values: None for a value that is not finite, which is never the best.
        is_chosen: value of --load_best_model_at_end.
    """

    metric: str
    greater_is_better: bool
    is_chosen: bool = False
    values: Mapping[int, float | None] = field(default_factory=dict)

    def having(self, step: int, value: float) -> Self:
        """Return the evaluations with a further one."""
        return replace(self, values={**self.values, step: value if math.isfinite(value) else None})

    def until(self, step: int) -> Self:
        """Return the evaluations of the steps up to `step`."""
        return replace(self, values={each: value for each, value in self.values.items() if each <= step})

    def best_of(self, steps: Iterable[int]) -> int | None:
        """Return the step with the best value, the first one of equal ones; None if none has a value."""
        best = None
        for step in sorted(steps):
            value = self.values.get(step)
            if value is not None and (best is None or self._is_better(value, self.values[best])):
                best = step
        return best

    def num_without_improvement(self, threshold: float) -> int:
        """Return the number of evaluations since the last improvement by more than `threshold`, as counted by
        transformers' EarlyStoppingCallback: each is compared with the best one before it.
        """
        best, number = None, 0
        for step in sorted(self.values):
            value = self.values[step]
            number += 1
            if value is None or not self._is_better(value, best):
                continue
            if best is None or abs(value - best) > threshold:
                number = 0
            best = value
        return number

    def _is_better(self, value: float, other: float | None) -> bool:
        if other is None:
            return True
        return value > other if self.greater_is_better else value < other

    def write(self, run: Path) -> None:
        """Write the file of a run. The best value and its step are for readers."""
        best = self.best_of(self.values)
        content = {
            "metric_for_best_model": self.metric,
            "greater_is_better": self.greater_is_better,
            "load_best_model_at_end": self.is_chosen,
            "best_metric": None if best is None else self.values[best],
            "best_global_step": best,
            "evaluations": [{"step": step, "value": self.values[step]} for step in sorted(self.values)],
        }
        atomic_write(run / BEST_FILE, json.dumps(content, indent=2).encode() + b"\n")

    @classmethod
    def read(cls, run: Path) -> Self | None:
        """Return the evaluations of a run; None if it has no valid file."""
        path = run / BEST_FILE
        if not path.is_file():
            return None
        try:
            content: Any = read_json(path)
            values = {int(each["step"]): each["value"] for each in content["evaluations"]}
            known = {step: None if value is None else float(value) for step, value in values.items()}
            return cls(
                str(content["metric_for_best_model"]),
                bool(content["greater_is_better"]),
                bool(content["load_best_model_at_end"]),
                known,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is ignored: %s", path, error)
            return None


def best_checkpoint(run: Path) -> Path | None:
    """Return the best checkpoint of a run, which is never deleted; None without evaluations."""
    evaluations = Evaluations.read(run)
    if evaluations is None:
        return None
    checkpoints = {int(path.name.removeprefix("checkpoint-")): path for path in run_checkpoints(run)}
    best = evaluations.best_of(checkpoints)
    return None if best is None else checkpoints[best]


def chosen_checkpoint(run: Path) -> Path | None:
    """Return the checkpoint that a run stands for: its best one with --load_best_model_at_end, otherwise the newest."""
    evaluations = Evaluations.read(run)
    if evaluations is not None and evaluations.is_chosen and (best := best_checkpoint(run)):
        logger.info("%s is the best checkpoint by %s (--load_best_model_at_end)", best, evaluations.metric)
        return best
    return next(reversed(run_checkpoints(run)), None)
