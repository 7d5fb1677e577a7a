"""Train in several processes, as torchrun would, and read the metrics."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftlite import rules
from swiftlite.args.commands import SftArgs
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.parallel.launch import launch, open_store, prepare_session
from tests.untimed import untimed

TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
CP2: dict[str, Any] = {"context_parallel_size": 2}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
Tolerance = dict[str, Any]


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


def check_layouts(
    alone: Mapping[str, SftArgs],
    layouts: Mapping[tuple[str, str], dict[str, Any]],
    tolerance: Tolerance | Callable[[SftArgs, int], Tolerance],
    on_three: Collection[tuple[str, str]] = (),
) -> dict[str, list[dict[str, float]]]:
    """Train each run in one process and in its layouts, and compare all metrics; return those of one process.

    Args:
        alone: options of the runs by what is trained.
        layouts: changes of the options, by what is trained and the name of the layout.
        tolerance: arguments of `pytest.approx`, of a run and a step (from 0) if they differ.
        on_three: layouts of three ranks; all others have two.
    """
    used = {what: alone[what] for what, _ in layouts}
    start(1, run_all, list(used.values()), 1)
    divided = {
        (what, name): replace(used[what], output_dir=f"{used[what].output_dir}_{name}", **layout)
        for (what, name), layout in layouts.items()
    }
    for number in (2, 3):
        jobs = [args for key, args in divided.items() if (key in on_three) == (number == 3)]
        if jobs:
            start(number, run_all, jobs, number)
    expected = {what: metrics_of(args) for what, args in used.items()}
    for (what, name), args in divided.items():
        for step, (one, many) in enumerate(zip(expected[what], metrics_of(args), strict=True)):
            limits = tolerance if isinstance(tolerance, dict) else tolerance(args, step)
            assert many == pytest.approx(one, **limits), f"{what} {name}, step {step + 1}"
    return expected
