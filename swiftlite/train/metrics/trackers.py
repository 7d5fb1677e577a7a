"""Send metrics to wandb, SwanLab, MLflow or Trackio through their own packages, which are optional.

Environment variables of each package set addresses, accounts, projects and offline modes. The command line, the output
on the console and the environment are not sent, because they may contain secrets.
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError, clip, reason_of
from swiftlite.base.json_file import read_json
from swiftlite.base.log import logger

PROJECT = "swiftlite"
"""Name of the tracker's project for a run, unless the tracker's environment variable sets another name."""
IDS_FILE = "trackers.json"
"""File in output_dir with the id of the run in each tracker. A resumed run continues the tracker's run with this id."""
MAX_PARAMETER = 500
"""Maximum length of an option's value that every release of MLflow accepts."""


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run for trackers.

    Attributes:
        config: the run's options, without secrets.
        known_ids: id of the tracker's run to continue, by name of the tracker; empty for a new run.
    """

    output_dir: Path
    config: Mapping[str, Any]
    known_ids: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.output_dir.absolute().name


@dataclass(frozen=True)
class Table:
    """A table for trackers, such as the completions of a generation."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]


@runtime_checkable
class TableLogger(Protocol):
    """A tracker or a metric logger that can show tables."""

    def log_table(self, step: int, table: Table) -> None: ...


class Tracker(Protocol):
    """One run of a tracker.

    Attributes:
        id: the tracker's id of the run, used to continue it when training resumes.
    """

    id: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def summarize(self, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, run: TrackedRun):
        import wandb  # pyright: ignore[reportMissingImports]

        self.id = run.known_ids.get("wandb") or secrets.token_hex(4)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=self.id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", run.output_dir),
            config=dict(run.config),
            settings=wandb.Settings(console="off", disable_code=True, disable_git=True, x_disable_meta=True),
        )
        # The steps of wandb must not decrease, but a run that resumes from a checkpoint repeats steps.
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({**metrics, "step": step})

    def log_table(self, step: int, table: Table) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        shown = wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self.run.log({table.name: shown, "step": step})

    def summarize(self, figures: Mapping[str, float]) -> None:
        self.run.summary.update(dict(figures))

    def close(self) -> None:
        self.run.finish()


class _LastPoint:
    """A run of a tracker without a summary, which is logged as the last point."""

    run: Any
    step = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.run.log(dict(metrics), step=step)

    def summarize(self, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures), step=self.step)

    def close(self) -> None:
        self.run.finish()


class SwanLab(_LastPoint):
    """A run of SwanLab."""

    def __init__(self, run: TrackedRun):
        import swanlab  # pyright: ignore[reportMissingImports]

        self.id = run.known_ids.get("swanlab") or secrets.token_hex(8)
        self.run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
            name=run.name,
            id=self.id,
            resume="allow",
            log_dir=os.environ.get("SWANLAB_LOG_DIR", str(run.output_dir / "swanlab")),
            config=dict(run.config),
            settings=swanlab.Settings(
                probe={"runtime": False, "git": False},
                terminal={"proxy_type": "none"},
            ),
        )

    def log_table(self, step: int, table: Table) -> None:
        import swanlab  # pyright: ignore[reportMissingImports]

        shown = swanlab.echarts.Table()  # requires pyecharts
        shown.add(list(table.columns), [list(row) for row in table.rows])
        self.run.log({table.name: shown}, step=step)


class MLflow:
    """A run of MLflow."""

    def __init__(self, run: TrackedRun):
        import mlflow  # pyright: ignore[reportMissingImports]

        known = run.known_ids.get("mlflow")
        if known is None:
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        self.mlflow = mlflow
        self.id = mlflow.start_run(run_id=known, run_name=run.name, log_system_metrics=False).info.run_id
        if known is None:
            mlflow.log_params({name: clip(str(value), MAX_PARAMETER) for name, value in run.config.items()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(metrics), step=step)

    def summarize(self, figures: Mapping[str, float]) -> None:
        self.mlflow.log_metrics(dict(figures))

    def close(self) -> None:
        self.mlflow.end_run()


class Trackio(_LastPoint):
    """A run of Trackio, which finds a run by its name."""

    def __init__(self, run: TrackedRun):
        import trackio  # pyright: ignore[reportMissingImports]

        known = run.known_ids.get("trackio")
        self.id = known or f"{run.name}-{secrets.token_hex(4)}"
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.id,
            config=dict(run.config),
            resume="allow" if known else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log_table(self, step: int, table: Table) -> None:
        import trackio  # pyright: ignore[reportMissingImports]
        from pandas import DataFrame

        shown = trackio.Table(dataframe=DataFrame(table.rows, columns=list(table.columns)))
        self.run.log({table.name: shown}, step=step)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": Wandb,
    "swanlab": SwanLab,
    "mlflow": MLflow,
    "trackio": Trackio,
}


class TolerantTracker:
    """A tracker that is disabled at its first failure, so that training continues without it."""

    def __init__(self, name: str, tracker: Tracker):
        self.name = name
        self.tracker: Tracker | None = tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda tracker: tracker.log(step, metrics))

    def summarize(self, figures: Mapping[str, float]) -> None:
        self._try(lambda tracker: tracker.summarize(figures))

    def close(self) -> None:
        self._try(lambda tracker: tracker.close())

    def _try(self, tell: Callable[[Tracker], None]) -> None:
        if self.tracker is None:
            return
        try:
            tell(self.tracker)
        except Exception as error:  # any error of the package, its server or the network
            self.tracker = None
            logger.warning("--report_to %s: %s; the run continues without it", self.name, reason_of(error))


class TolerantTableTracker(TolerantTracker):
    """A `TolerantTracker` that can show tables."""

    def log_table(self, step: int, table: Table) -> None:
        self._try(lambda tracker: tracker.log_table(step, table) if isinstance(tracker, TableLogger) else None)


def open_trackers(names: list[str], output_dir: Path, config: Mapping[str, Any], first: int) -> list[TolerantTracker]:
    """Open the trackers that `names` contains; other names, such as tensorboard, are ignored.

    Args:
        config: the run's options, without secrets.
        first: number of the last completed step; if it is not 0, each tracker continues its run.

    Raises:
        UserError: a tracker cannot be opened. If the run resumes, a warning is logged instead.
    """
    path = output_dir / IDS_FILE
    known = _known_ids(path) if first else {}
    ids = dict(known)
    trackers: list[TolerantTracker] = []
    for name in names:
        if name not in TRACKERS:
            continue
        try:
            tracker = TRACKERS[name](TrackedRun(output_dir, config, known))
        except Exception as error:
            if first:
                logger.warning("--report_to %s: %s; the run continues without it", name, reason_of(error))
                continue
            raise UserError(f"--report_to {name}: {reason_of(error)}", _OFFLINE[name]) from error
        ids[name] = tracker.id
        tolerant = TolerantTableTracker if isinstance(tracker, TableLogger) else TolerantTracker
        trackers.append(tolerant(name, tracker))
    if trackers:
        atomic_write(path, json.dumps(ids, indent=2).encode() + b"\n")
    return trackers


_OFFLINE = {
    "wandb": "log in with `wandb login`, or keep the run here with WANDB_MODE=offline",
    "swanlab": "log in with `swanlab login`, or keep the run here with SWANLAB_MODE=local",
    "mlflow": "set MLFLOW_TRACKING_URI to a server, or to a file: sqlite:///mlflow.db",
    "trackio": "keep the run here: unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL",
}


def _known_ids(path: Path) -> dict[str, str]:
    """Return the stored ids; empty if the file is damaged, so that trackers start new runs."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {name: value for name, value in content.items() if isinstance(value, str)}
