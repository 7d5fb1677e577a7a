"""Test how the process of llm-compressor is run, with small programs in its place.

The real llm-compressor runs in tests/export/test_calibrated.py.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from swiftlite.base.errors import UserError
from swiftlite.runtime.llm_compressor import run
from tests.messages import mentions

# A shell's background jobs ignore SIGINT, and their processes inherit this.
RUN = """
import signal, sys
from swiftlite.runtime.llm_compressor import run
signal.signal(signal.SIGINT, signal.default_int_handler)
run([sys.executable, "-c", sys.argv[1]], "gptq")
"""


def python(*arguments: str) -> list[str]:
    return [sys.executable, "-c", *arguments]


@pytest.mark.parametrize(
    ("program", "tokens"),
    [
        ("import sys; print('first'); sys.exit('no more memory')", "1 first memory"),
        ("import os, signal; print('second', flush=True); os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL second"),
        ("import sys; print('noise'); print('no class of mamba'); sys.exit(3)", "--quant_method gptq mamba"),
    ],
)
def test_a_failed_process_is_reported_with_the_end_of_its_output(capfd, program, tokens):
    with pytest.raises(UserError) as error:
        run(python(program), "gptq")
    assert mentions(str(error.value), tokens)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_the_process_ends_with_its_caller(number):
    """After Ctrl-C, and after kill -9, no process is left."""
    program = "import os, time; print('started', os.getpid(), flush=True); time.sleep(300)"
    with subprocess.Popen(python(RUN, program), stderr=subprocess.PIPE, text=True) as caller:
        try:
            assert caller.stderr is not None
            line = next(line for line in caller.stderr if "started" in line)
            process = psutil.Process(int(line.split()[-1]))
            until(lambda: psutil.Process(caller.pid).status() == psutil.STATUS_SLEEPING)  # it reads the next line
            os.kill(caller.pid, number)
            assert caller.wait(timeout=60) == -number
            until(lambda: has_ended(process))
        finally:
            caller.kill()


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
