"""Code shared by benchmarks: time a step, and run the compared programs ("contestants") in alternating subprocesses."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any


def timed(step: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a step, and its result."""
    start = time.perf_counter()
    result = step()
    return time.perf_counter() - start, result


def race(names: Iterable[str], rounds: int, threads: int, *options: object) -> dict[str, list[Any]]:
    """Run the script again with `--contestant NAME` for each name, in alternating order.

    With alternating subprocesses, a machine that is slow for some time slows down all contestants.

    Args:
        options: options of the script, in addition to those with which it was started.

    Returns:
        For each contestant, the last line of its output in each round, parsed as JSON.
    """
    results: dict[str, list[Any]] = {name: [] for name in names}
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    for _ in range(rounds):
        for name, found in results.items():
            command = [sys.executable, *sys.argv, "--contestant", name, *map(str, options)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return results
