"""Execute one program and judge it by tests, as a script in a separate process (`rewards/code_tests.py`).

    python -I code_runner.py PARENT SECONDS < {"program": ..., "tests": [...]}

The current directory, which is empty, becomes that of the program. The script starts two processes, and ends all
processes that they start. The judge reads the request, executes the tests, and writes `+` to stdout for each passed
test. The other process executes the program. It has neither the tests nor stdout, and answers calls of the judge
(`rewards/code_link.py`). The script runs without swiftlite's environment, so it imports only the standard library.
"""

import json
import math
import os
import signal
import socket
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from swiftlite.rewards.code_limits import (
    adopt_orphans,
    children,
    hide_memory,
    isolate,
    limit_resources,
)
from swiftlite.rewards.code_link import FUNCTIONS, Link, as_name_of_test
from swiftlite.runtime.parent import exit_with_parent

del sys.path[0]


def main(parent: int, seconds: float) -> None:
    """Start both processes, and end all processes when the judge has ended or the time is over.

    Args:
        parent: id of the process that started this one.
        seconds: limit of the elapsed time.
    """
    exit_with_parent(parent)
    adopt_orphans()
    signal.signal(signal.SIGALRM, _raise_timeout)
    ours, theirs = socket.socketpair()
    _start(lambda: _execute(theirs, seconds), ours)
    hide_memory()  # before the judge sends the program
    judge = _start(lambda: _judge(ours, seconds), theirs)
    ours.close()
    theirs.close()
    with suppress(TimeoutError):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        os.waitpid(judge, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _end_children()


def _raise_timeout(number: int, frame: object) -> None:
    raise TimeoutError


def _start(function: Callable[[], None], other: socket.socket) -> int:
    """Execute a function in a forked process, which does not have the socket of the other one."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        exit_with_parent(parent)
        other.close()
        function()
    finally:
        os._exit(0)  # do not wait for threads of the program


def _end_children() -> None:
    """Kill the children, and the orphans that become children when their parent ends, until all have ended."""
    while True:
        for pid in children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _execute(channel: socket.socket, seconds: float) -> None:
    """Execute the program, and then calls of the judge."""
    _close_standard_streams()
    os.dup2(channel.fileno(), 3)
    channel.detach()
    os.closerange(4, 256)
    isolate(str(Path.cwd()))
    limit_resources(math.ceil(seconds) + 1)
    sys.set_int_max_str_digits(0)
    module = types.ModuleType("completion")
    sys.modules["completion"] = module  # dataclasses, for example, look up the module of a class

    def run(program: str) -> list[str]:
        exec(compile(program, "completion.py", "exec"), module.__dict__)
        return list(module.__dict__)

    functions = FUNCTIONS | {"run": run, "name": lambda name: module.__dict__[name]}
    Link(socket.socket(fileno=3), functions).serve()


def _judge(channel: socket.socket, seconds: float) -> None:
    """Send the program to the other process, and write `+` for each test that passes."""
    request = json.load(sys.stdin)
    result = os.dup(1)
    _close_standard_streams()
    limit_resources(math.ceil(seconds) + 1)
    sys.set_int_max_str_digits(0)
    link = Link(channel)
    names: dict[str, Any] = {"__name__": "test"}
    given: dict[str, Any] = {}
    defined = set(link.call("run", request["program"]))
    for test in request["tests"]:
        with suppress(BaseException):
            code = compile(test, "test.py", "exec")
            for name in defined.intersection(_names_in(code)):
                if names.get(name) is given.get(name):  # no test has replaced it
                    value = as_name_of_test(name, link.call("name", name))
                    names |= {name: value} if value is not None else {}
                    given[name] = names.get(name)
            exec(code, names)
            if not link.is_broken:
                os.write(result, b"+")


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a test and its functions use, and names of attributes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _close_standard_streams() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
