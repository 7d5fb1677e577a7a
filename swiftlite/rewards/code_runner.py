"""Execute one program and its tests, as a script in a separate process (`rewards/code_tests.py`).

    python -I code_runner.py PARENT SECONDS < {"program": ..., "tests": [...]}

Each passed test writes `+` to the original stdout, which the program does not have. The script runs without
swiftlite's environment, so it imports only the standard library.
"""

import json
import math
import os
import resource
import runpy
import sys
from contextlib import suppress
from pathlib import Path

MAX_MEMORY = 2 * 1024**3
MAX_FILE = 16 * 1024**2


def main(parent: int, seconds: float) -> None:
    """Read the request and execute it.

    Args:
        parent: id of the process that started this one.
        seconds: limit of processor time; the parent limits the elapsed time.
    """
    here = Path(__file__).resolve()
    runpy.run_path(str(here.parents[1] / "runtime" / "parent.py"))["exit_with_parent"](parent)
    request = json.load(sys.stdin)
    result = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    _limit(math.ceil(seconds) + 1)

    names: dict = {"__name__": "completion"}
    with suppress(BaseException):
        exec(compile(request["program"], "completion.py", "exec"), names)
        for test in request["tests"]:
            with suppress(BaseException):
                exec(compile(test, "test.py", "exec"), names)
                os.write(result, b"+")
    os._exit(0)  # do not wait for threads of the program


def _limit(cpu_seconds: int) -> None:
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: MAX_MEMORY,
        resource.RLIMIT_FSIZE: MAX_FILE,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        with suppress(ValueError, OSError):  # a lower limit of the user remains
            resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
