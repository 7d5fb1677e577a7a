"""Processes that tests start, forked from one that has imported what most of them need: each would take 8 s for it.

A forked process has everything else of its own: environment, directory, signals, exit code; and nothing of those that
ran before it.
"""

import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# None of them starts a thread. What a process needs beyond these it imports itself.
PRELOADED = [
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "torch.distributed.checkpoint",
    "transformers.models.auto.tokenization_auto",
    "swiftlite.evaluate.command",
    "swiftlite.export.run",
    "swiftlite.regenerate.command",
    "swiftlite.serve.infer",
    "swiftlite.engines.transformers.engine",
    "swiftlite.train.run",
    "swiftlite.train.methods.sft",
    "tests.parallel.packing",
    "tests.parallel.parity",
]


def forkserver() -> ForkServerContext:
    """The one that processes are forked from; it starts when the first of them does."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    return multiprocessing.get_context("forkserver")


class Running:
    """Some processes that are one command, with those parts of `subprocess.Popen` that tests use."""

    def __init__(self, args: Sequence[str], processes: Sequence[BaseProcess], out: Path, err: Path):
        self.args = list(args)
        self._processes = processes
        self._files = out, err

    @property
    def pid(self) -> int:
        """That of the first process, and of a process group of its own."""
        return self._processes[0].pid or 0

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """The exit code of the first process that failed, -N of one that signal N ended; None while all may go on."""
        codes = [process.exitcode for process in self._processes]
        if failed := [code for code in codes if code]:
            return failed[0]
        return None if None in codes else 0

    def wait(self, timeout: float) -> int:
        """Until all have ended; when one fails, the others are killed.

        Raises:
            subprocess.TimeoutExpired: after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout, *self._read())
            wait([process.sentinel for process in self._processes if process.exitcode is None], 1)
        self.kill(after=5)
        return code

    def kill(self, after: float = 0) -> int | None:
        """Kill those that have not ended after so many seconds, and return the exit code as `poll` does."""
        for process in self._processes:
            process.join(after)
            process.kill()
            process.join()
        return self.poll()

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """What was written to stdout and stderr, once all have ended."""
        self.wait(timeout)
        return self._read()

    def send_signal(self, number: int) -> None:
        for process in self._processes:
            os.kill(process.pid or 0, number)

    def _read(self) -> tuple[str, str]:
        out, err = (path.read_text() for path in self._files)
        return out, err


def start_swiftlite(
    argv: Sequence[str], directory: Path, environments: Sequence[Mapping[str, str]], out: Path, err: Path
) -> Running:
    """`swiftlite argv` in `directory`, a process for each environment; their output is appended to `out` and `err`."""
    processes = []
    for environment in environments:
        process = forkserver().Process(target=_become_swiftlite, args=(argv, directory, out, err, environment))
        process.start()
        processes.append(process)
    return Running(argv, processes, out, err)


def _become_swiftlite(argv: Sequence[str], directory: Path, out: Path, err: Path, environment: Mapping[str, str]):
    gc.freeze()  # otherwise every collection visits all modules, which takes half a second
    os.setsid()  # so that a signal to its group reaches what it starts, and nothing else
    os.environ.clear()
    os.environ.update(environment)
    run_swiftlite(argv, directory, out, err)


def run_swiftlite(argv: Sequence[str], directory: Path, out: Path, err: Path) -> None:
    """What `python -W ignore -m swiftlite argv` does, in this process, which it ends."""
    import torch

    from swiftlite.cli.main import main

    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(directory)
    warnings.simplefilter("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # A test session in the background of a shell, or under nohup, ignores these, and so would its processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.argv = ["swiftlite", *argv]
    sys.exit(main())


class Host:
    """A process that imports some modules more, and forks another one for each call.

    Args:
        modules: names; none of them may start a thread.
        environment: what is added to it before they are imported.
        prepare: called after they are imported; of a module's top level.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], prepare: Callable[[], None] | None = None
    ):
        self._connection, theirs = multiprocessing.Pipe()
        self._process = forkserver().Process(target=_host, args=(theirs, modules, environment, prepare))
        self._process.start()
        theirs.close()

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 600) -> Any:
        """What `function(*args)` returns in a process of its own, or the exit code that it ended that process with.

        Args:
            function: of a module's top level.
            args: anything that can be pickled, and so the result.

        Raises:
            RuntimeError: with the traceback of the process, if it failed.
        """
        self._connection.send((function, args))
        if not self._connection.poll(timeout):
            raise TimeoutError(f"{function.__name__} took more than {timeout} s")
        result, failure = pickle.loads(self._connection.recv_bytes())
        if failure:
            raise RuntimeError(failure)
        return result

    def close(self) -> None:
        self._connection.close()
        self._process.join(60)
        self._process.kill()


def _host(
    calls: Connection, modules: Sequence[str], environment: Mapping[str, str], prepare: Callable[[], None] | None
) -> None:
    os.environ.update(environment)
    for name in modules:
        importlib.import_module(name)
    if prepare:
        prepare()
    gc.freeze()
    fork = multiprocessing.get_context("fork")
    while True:
        try:
            function, args = calls.recv()
        except EOFError:
            return
        answer, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_answer, args=(theirs, function, args))
        process.start()
        theirs.close()
        # The end of the pipe would not do: something that the process started may hold it open.
        wait([answer, process.sentinel])
        if answer.poll():
            calls.send_bytes(answer.recv_bytes())
        else:
            calls.send_bytes(pickle.dumps((None, f"its process ended with {process.exitcode}")))
        process.join()
        answer.close()


def _answer(caller: Connection, function: Callable[..., Any], args: tuple) -> None:
    try:
        answer = pickle.dumps((function(*args), ""))  # by value: `send` would hand over tensors as shared memory
    except SystemExit as end:
        answer = pickle.dumps((end.code, ""))
    except BaseException:
        answer = pickle.dumps((None, traceback.format_exc()))
    caller.send_bytes(answer)
