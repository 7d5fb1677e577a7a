"""Follow the metric of --metric_for_best_model during training, and decide when training ends early."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from swiftlite.args.fields import RunArgs
from swiftlite.base.errors import UserError
from swiftlite.plan.best_metric import greater_is_better, metric_of
from swiftlite.report.metrics import evaluations_in, read_metrics
from swiftlite.store.best import Evaluations

FLAG = "--metric_for_best_model"
ACCEPTANCE = "eval_acceptance"
_OF_A_DEPTH = re.compile(r"eval_(mtp_\d+_acceptance|rollout/acceptance_\d+)")


@dataclass
class BestModel:
    """The evaluations of a run so far.

    Attributes:
        run: directory of the run.
        evaluations: those of all processes so far. Only the first rank reads and writes their file.
        patience: value of --early_stopping_patience.
        threshold: value of --early_stopping_threshold.
    """

    run: Path
    evaluations: Evaluations
    patience: int | None
    threshold: float
    is_first_rank: bool

    @classmethod
    def of(cls, args: RunArgs, first: int, *, is_first_rank: bool) -> "BestModel | None":
        """Return the object of a run; None without --metric_for_best_model.

        Args:
            first: step of the checkpoint that the run resumes from; 0 for a new run.

        Raises:
            UserError: the earlier evaluations of the run do not have this metric; on the first rank.
        """
        metric = metric_of(args)
        if metric is None:
            return None
        run = Path(args.output_dir)
        evaluations = Evaluations(metric, greater_is_better(args), args.load_best_model_at_end)
        if first and is_first_rank:
            for step, value in _earlier_values(run, evaluations, first).items():
                evaluations = evaluations.having(step, value)
        return cls(run, evaluations, args.early_stopping_patience, args.early_stopping_threshold, is_first_rank)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the evaluation of a step.

        Raises:
            UserError: the evaluation does not have the metric; raised on every rank.
        """
        self.evaluations = self.evaluations.having(step, value_of(self.evaluations.metric, metrics))
        if self.is_first_rank:
            self.evaluations.write(self.run)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Check that an evaluation has the metric.

        Raises:
            UserError: it does not; raised on every rank.
        """
        value_of(self.evaluations.metric, metrics)

    @property
    def ends_training(self) -> bool:
        """Whether the metric has not improved for too long, as known on the first rank."""
        if self.patience is None:
            return False
        return self.evaluations.num_without_improvement(self.threshold) >= self.patience


def value_of(metric: str, metrics: Mapping[str, Any]) -> float:
    """Return the value of a metric in an evaluation.

    Raises:
        UserError: the evaluation does not have it.
    """
    of_heads = [value for name, value in metrics.items() if _OF_A_DEPTH.fullmatch(name)]
    known = {name: value for name, value in metrics.items() if name.startswith("eval_")}
    if of_heads:
        known[ACCEPTANCE] = fmean(of_heads)
    if metric not in known:
        names = ", ".join(sorted(name.removeprefix("eval_") for name in known))
        hint = f"use one of {names}" if names else "hold out rows: --val_dataset FILE"
        raise UserError(f"{FLAG} {metric.removeprefix('eval_')}: evaluations of this run do not have it", hint)
    return known[metric]


def _earlier_values(run: Path, evaluations: Evaluations, first: int) -> dict[int, float]:
    """Return the values of the metric up to the step that a run resumes from. If the run had another metric, or none,
    the values are those in metrics.jsonl.
    """
    earlier = Evaluations.read(run)
    if earlier is not None and earlier.metric == evaluations.metric:
        values = earlier.until(first).values
        return {step: float("nan") if value is None else value for step, value in values.items()}
    lines = [line for line in evaluations_in(read_metrics(run)) if 0 < line["step"] <= first]
    return {line["step"]: value_of(evaluations.metric, line) for line in lines}
