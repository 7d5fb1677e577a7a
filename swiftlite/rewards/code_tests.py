"""Run the Python of completions against tests, each completion in separate processes.

A test is executed by a judge, in another process than the program (`code_runner.py`). The processes have limits on
time, memory and the size of files, an empty directory and an environment without credentials. What else the program can
reach depends on the kernel (`code_limits.py`); the network is that of its user.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from swiftlite.rewards.settings import RewardSettings
from swiftlite.rewards.workers import num_processes

RUNNER = Path(__file__).with_name("code_runner.py")
PATIENCE = 2.0
"""Seconds in which the script ends the processes of a program after the time limit."""

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def code_block(text: str) -> str:
    """Return the content of the last block of code in Markdown, or the whole text if it has no block."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def code(settings: RewardSettings, /, completions: Sequence[str], tests: Sequence[Any]) -> list[float | None]:
    """Return the fraction of a row's tests that a completion's Python passes.

    The Python is the last block of code after `</think>`, or the whole text if there is no block. Tests are Python
    source: a list of strings, or one string, which counts as one test. A test that raises an exception is not passed.
    A program only sees the arguments of its calls (`code_link.py`).
    When `code_timeout` is over, the remaining tests of a completion are not passed. A completion is not scored if its
    row has no tests.
    """

    def score(completion: str, row: Any) -> float | None:
        sources = [row] if isinstance(row, str) else list(row or ())
        if not sources:
            return None
        program = code_block(completion.rpartition("</think>")[2])
        return _num_passed(program, sources, settings.code_timeout) / len(sources)

    with ThreadPoolExecutor(num_processes()) as pool:
        return list(pool.map(score, completions, tests))


def _num_passed(program: str, tests: Sequence[str], seconds: float) -> int:
    """Run a program and its tests, and return how many of the tests pass."""
    with _directory() as directory:
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
            output, _ = process.communicate(request, timeout=seconds + PATIENCE)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            output, _ = process.communicate()
        finally:
            _kill_group(process)
    return min(output.count(b"+"), len(tests))


@contextmanager
def _directory() -> Iterator[str]:
    """Create an empty directory, and remove it with what a program has written."""
    directory = Path(tempfile.mkdtemp(prefix="swiftlite-code-"))
    try:
        yield str(directory)
    finally:
        with suppress(OSError):
            _remove(directory)


def _remove(directory: Path) -> None:
    """Remove a directory of any depth.

    `shutil.rmtree` is recursive in Python 3.11, and the length of a path is limited. So each directory inside is first
    moved to the top.
    """
    directory.chmod(0o700)  # a program can deny its user access
    waiting = [directory]
    while waiting:
        current = waiting.pop()
        for path in list(current.iterdir()):
            if path.is_symlink() or not path.is_dir():
                path.unlink()
                continue
            path.chmod(0o700)
            waiting.append(path.rename(directory / uuid4().hex))
        if current != directory:
            current.rmdir()
    directory.rmdir()


def _kill_group(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
