"""Train in several processes, as torchrun would, and read the metrics."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swiftlite import rules
from swiftlite.args.commands import SftArgs
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.parallel.launch import launch, open_store, prepare_session
from tests.untimed import untimed


def train(args: SftArgs) -> int:
    """Do what the command does, without the page, whose figures take longer than the steps."""
    phases.write_page = lambda run: None  # this process ends with the run
    return training.run(args)


def run_all(jobs: Sequence[SftArgs], ports: Sequence[int], world_size: int) -> None:
    """Train the jobs in this process, each in a separate session."""
    for args, port in zip(jobs, ports, strict=True):
        prepare_session(port)
        rules.check(args, world_size)
        train(args)


def start(num_processes: int, function: Callable[..., None], jobs: Sequence[SftArgs], *more: Any) -> None:
    """Call a function with jobs and the port of a store for each."""
    stores = [open_store() for _ in jobs]
    launch(num_processes, function, jobs, [store.port for store in stores], *more)


def metrics_of(args: SftArgs) -> list[dict[str, float]]:
    """Return the metrics of each step and of each evaluation, without speeds and sizes."""
    lines = [json.loads(line) for line in (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()]
    return [untimed(line) for line in lines]
