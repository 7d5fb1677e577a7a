"""Run the Python of completions against tests, each completion in a separate process.

The processes have limits on time, memory and the size of files, an empty directory and an environment without
credentials. This protects against endless loops and accidents, but it is not a sandbox: a process has the permissions
and the network of its user.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from swiftlite.rewards.settings import RewardSettings

RUNNER = Path(__file__).with_name("code_runner.py")
MAX_PROCESSES = 8
SHARE_OF_TIMEOUT = 0.8
"""Fraction of `RewardSettings.timeout` in which all completions are run, so that endless loops in completions do not
make the whole call fail."""

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def code_block(text: str) -> str:
    """Return the content of the last block of code in Markdown, or the whole text if it has no block."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def code(settings: RewardSettings, /, completions: Sequence[str], tests: Sequence[Any]) -> list[float | None]:
    """Return the fraction of a row's tests that a completion's Python passes.

    The Python is the last block of code after `</think>`, or the whole text if there is no block. Tests are Python
    source: a list of strings, or one string, which counts as one test. A test that raises an exception is not passed.
    When `code_timeout` is over, the remaining tests of a completion are not passed. A completion is not scored if its
    row has no tests, or if the time limit of the call does not suffice for it.
    """
    end = time.monotonic() + SHARE_OF_TIMEOUT * settings.timeout

    def score(completion: str, row: Any) -> float | None:
        sources = [row] if isinstance(row, str) else list(row or ())
        if not sources or time.monotonic() + settings.code_timeout > end:
            return None
        program = code_block(completion.rpartition("</think>")[2])
        return _num_passed(program, sources, settings.code_timeout) / len(sources)

    with ThreadPoolExecutor(min(MAX_PROCESSES, os.cpu_count() or 1)) as pool:
        return list(pool.map(score, completions, tests))


def _num_passed(program: str, tests: Sequence[str], seconds: float) -> int:
    """Run a program and its tests, and return how many of the tests pass."""
    with tempfile.TemporaryDirectory(prefix="swiftlite-code-", ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [sys.executable, "-I", str(RUNNER), str(os.getpid()), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={"PATH": os.defpath, "HOME": directory, "TMPDIR": directory, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # so that processes started by the program are killed with it
        )
        request = json.dumps({"program": program, "tests": list(tests)}).encode()
        try:
            output, _ = process.communicate(request, timeout=seconds)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            output, _ = process.communicate()
        finally:
            _kill_group(process)
    return output.count(b"+")


def _kill_group(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
