"""Write metrics to a progress bar, metrics.jsonl, TensorBoard, and trackers (`trackers.py`), on rank 0 only."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tqdm import tqdm

from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError, reason_of
from swiftlite.base.log import logger
from swiftlite.report.metrics import decisions_in, evaluations_in, metrics_of, restarts_in
from swiftlite.runtime.decisions import METRICS_FILE
from swiftlite.train.metrics.trackers import open_trackers


class MetricLogger(Protocol):
    """A destination for the metrics of each step and the summary of the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def summarize(self, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class ProgressBar:
    """A progress bar on stderr with the main metrics and the remaining time."""

    SHORT: ClassVar = {"learning_rate": "lr", "tokens_per_second": "tok/s"}

    def __init__(self, last: int):
        self.last = last
        self.bar: tqdm | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if restarts_in([metrics]):  # in the log
            return
        if evaluations_in([metrics]):
            tqdm.write(f"step {step}: " + self._render(metrics), file=sys.stderr)
            return
        if self.bar is None:
            # Created at the first step, because evaluation and measuring acceptance before it would distort rate and
            # ETA. If stderr is a file or a CI log, one line every 20 s is enough.
            interval, bar_format = 20.0, "{l_bar}{bar}{r_bar}\n"
            if sys.stderr.isatty():
                interval, bar_format = 0.1, None
            self.bar = tqdm(
                initial=step,
                total=self.last,
                unit="step",
                mininterval=interval,
                bar_format=bar_format,
                dynamic_ncols=True,
            )
        self.bar.set_postfix_str(self._render(metrics), refresh=False)
        self.bar.update(step - self.bar.n)

    def _render(self, metrics: Mapping[str, float]) -> str:
        shown = {name: value for name, value in metrics.items() if not name.startswith(("time/", "total_"))}
        return " ".join(f"{self.SHORT.get(name, name)}={value:.4g}" for name, value in shown.items())

    def summarize(self, figures: Mapping[str, float]) -> None:
        """Do nothing, because the summary is in the log."""

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class MetricsFile:
    """The file metrics.jsonl, with one JSON object per line. The file is flushed after each line.

    Args:
        first: step of the checkpoint that the run resumes from; lines of later steps are removed.
        last: step of the final evaluation. A run that resumes at this step only repeats this evaluation.
        resumes: whether the run continues an earlier one (--resume, or a restart by the launcher), which may have no
            checkpoint yet. Lines about restarts are kept, whatever their step, and decisions up to `first`.
    """

    def __init__(self, path: Path, first: int, last: int, *, resumes: bool = False):
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file", "move it elsewhere")
        lines = []
        if path.exists() and (first or resumes):
            lines = path.read_bytes().splitlines()
        written = [metrics_of(line) for line in lines]
        if damaged := written.count(None):
            logger.warning("%s: skipped %d damaged lines, as a full disk leaves them", path, damaged)
        kept = []
        for line, metrics in zip(lines, written, strict=True):
            if metrics is None:
                continue
            is_before = first > 0 and metrics["step"] <= first
            is_repeated = metrics["step"] == last and bool(evaluations_in([metrics]))
            is_decision = bool(decisions_in([metrics])) and metrics["step"] <= first
            if restarts_in([metrics]) or is_decision or (is_before and not is_repeated):
                kept.append(line)
        atomic_write(path, b"".join(line + b"\n" for line in kept))
        self.path = path
        self.file = path.open("a", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written: {reason_of(error)}",
                "free disk space or repair the disk; the same command with --resume continues from the last checkpoint",
            ) from None

    def summarize(self, figures: Mapping[str, float]) -> None:
        """Do nothing, because the summary is in acceptance.json."""

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Writes metrics as scalars for TensorBoard."""

    def __init__(self, directory: Path, first: int):
        from torch.utils.tensorboard import SummaryWriter  # needs the optional tensorboard package

        purge_step = first + 1 if first else None
        self.writer = SummaryWriter(str(directory), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def summarize(self, figures: Mapping[str, float]) -> None:
        """Do nothing, because TensorBoard shows only charts."""

    def close(self) -> None:
        self.writer.close()


def open_metric_loggers(
    output_dir: Path,
    first: int,
    last: int,
    report_to: list[str],
    config: Mapping[str, Any] | None = None,
    *,
    resumes: bool = False,
) -> list[MetricLogger]:
    """Open all metric loggers for the steps after `first`.

    Args:
        report_to: names of the optional metric loggers.
        config: the run's options, without secrets.
        resumes: see `MetricsFile`.

    Raises:
        UserError: a metric logger cannot be opened.
    """
    metrics_file = MetricsFile(output_dir / METRICS_FILE, first, last, resumes=resumes)
    metric_loggers: list[MetricLogger] = [ProgressBar(last), metrics_file]
    if "tensorboard" in report_to:
        try:
            metric_loggers.append(TensorBoard(output_dir / "tensorboard", first))
        except ImportError:
            logger.info("no TensorBoard files: the package tensorboard is not installed (pip install tensorboard)")
    return [*metric_loggers, *open_trackers(report_to, output_dir, config or {}, first)]
