"""Run vLLM in a process in which torchvision can be imported.

    python -m tests.e2e.vllm_with_images CALLS RESULTS

The process imports vLLM once, and forks another process for each call.
"""

import importlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests import torchvision_here


def results_of(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of functions that start vLLM, such as `partial(vllm_here.serve, ...)`.

    Args:
        calls: functions that can be pickled; their results must be picklable too.
    """
    with tempfile.TemporaryDirectory() as directory:
        asked, answered = Path(directory) / "calls", Path(directory) / "results"
        asked.write_bytes(pickle.dumps(calls))
        command = [sys.executable, "-W", "ignore", "-m", "tests.e2e.vllm_with_images", str(asked), str(answered)]
        done = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-5000:]
        return pickle.loads(answered.read_bytes())


def main(asked: str, answered: str) -> None:
    """Call functions, each in a process of its own, and write their results."""
    torchvision_here.install()
    from tests.e2e import vllm_here

    os.environ.update(vllm_here.ENVIRONMENT)
    for name in vllm_here.MODULES:
        importlib.import_module(name)
    vllm_here.vllm_forks.install()
    calls = pickle.loads(Path(asked).read_bytes())
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        results = pool.map(_call, calls, chunksize=1)
    Path(answered).write_bytes(pickle.dumps([pickle.loads(result) for result in results]))


def _call(function: Callable[[], Any]) -> bytes:
    return pickle.dumps(function())  # by value: otherwise tensors would be in memory that the process shares


if __name__ == "__main__":
    main(*sys.argv[1:])
