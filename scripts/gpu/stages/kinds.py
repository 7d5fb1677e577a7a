"""Run every kind of training run of `tests/cuda_emulated` from the command line to its report, on the GPU and on the
CPU, and compare the losses.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from result import Results, Settings

from tests.cuda_emulated.kinds import KINDS, bound_of, loss_pairs, write_inputs
from tests.kinds import Kind

ROOT = Path(__file__).resolve().parents[3]
PROCESSES = {"cuda": 10, "cpu": 4}
"""Number of processes by device. Most of the time, a run on a GPU starts up or compiles kernels."""
FLOAT32_BOUND = 1e-4
"""Maximum difference of losses in float32. A GPU adds in another order than a CPU, and the optimizer amplifies the
difference where a gradient is close to zero."""


def run(settings: Settings, results: Results) -> None:
    names = settings.selected(KINDS)
    if settings.tiny:
        names = ["dense", "streamed trunk"]
    directory = settings.work_dir / "kinds"
    shutil.rmtree(directory, ignore_errors=True)  # results of an earlier run
    directory.mkdir(parents=True)
    write_inputs(directory, names)
    workers = []
    for device in (settings.device, "cpu"):
        for first in range(PROCESSES[device]):
            if some := names[first :: PROCESSES[device]]:
                workers.append(start(device, directory, some))
    pending = names
    while pending:
        is_over = all(worker.poll() is not None for worker in workers)
        for name in pending:
            if is_over or has_results(settings, directory, name):
                compare(settings, results, directory, name)
        pending = [name for name in pending if not (is_over or has_results(settings, directory, name))]
        time.sleep(0.5)


def has_results(settings: Settings, directory: Path, name: str) -> bool:
    return all((directory / "results" / device / f"{name}.json").exists() for device in (settings.device, "cpu"))


def start(device: str, directory: Path, names: list[str]) -> subprocess.Popen:
    """Start a process that runs these kinds one after another."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "tests.cuda_emulated.worker", device, str(directory), *names]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=sys.stderr)


def compare(settings: Settings, results: Results, directory: Path, name: str) -> None:
    """Add a kind's largest difference of losses to the results, or why the run failed."""
    found = {}
    for device in (settings.device, "cpu"):
        path = directory / "results" / device / f"{name}.json"
        if not path.exists():
            results.add(name, f"no results on {device}", False, "exit code 0")
            return
        found[device] = json.loads(path.read_text())
        if any(found[device]["codes"]):
            log = settings.output_dir / f"kinds, {name}, {device}.log"
            log.write_text(found[device]["said"])
            results.add(name, f"exit codes {found[device]['codes']} on {device}, see {log}", False, "exit code 0")
            return
    try:
        pairs = loss_pairs(found[settings.device]["metrics"], found["cpu"]["metrics"])
    except ValueError as error:
        results.add(name, str(error), False, "the metrics of the CPU")
        return
    worst = max(abs(ours - theirs) / max(1, abs(theirs)) for _, ours, theirs in pairs)
    results.at_most(f"{name}: difference of losses", worst, bound(KINDS[name]))


def bound(kind: Kind) -> float:
    if kind.is_float32:
        return FLOAT32_BOUND
    return bound_of(kind)
