"""Start processes for tests by forking a process that has imported what most tests need; importing takes 8 s.

A forked process has its own environment, directory, signals and exit code, and shares nothing with earlier processes.
"""

import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

# None of them starts a thread. What a process needs beyond these it imports itself.
PRELOADED = [
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "torch.distributed.checkpoint",
    "transformers.models.auto.tokenization_auto",
    "swiftlite.cli.main",
    "swiftlite.rewards.equal",
    "swiftlite.rewards.schema",
    "swiftlite.serve.evaluate.command",
    "swiftlite.export.run",
    "swiftlite.improve.regenerate.command",
    "swiftlite.serve.infer",
    "swiftlite.engines.transformers.engine",
    "swiftlite.train.run",
    "swiftlite.train.methods.sft",
    "pytest",  # which test modules import, and with them each rank of theirs
    "tests.parallel.packing",
    "tests.parallel.parity",
]


def forkserver() -> ForkServerContext:
    """Return the process that others are forked from. It starts with the first call.

    Code under test that forks from it as well then finds it running, with everything imported.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    ensure_running()
    return multiprocessing.get_context("forkserver")


class Running:
    """The processes of one command, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, args: Sequence[str], processes: Sequence[BaseProcess], out: Path, err: Path):
        self.args = list(args)
        self._processes = processes
        self._files = out, err
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Id of the first process, which is also the id of its process group."""
        return self._processes[0].pid or 0

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit code of the first process that failed, or -N if signal N ended it; None while all may still
        run.
        """
        codes = [process.exitcode for process in self._processes]
        if self._code is None and any(codes):
            self._code = next(code for code in codes if code)
        if self._code is None and None not in codes:
            self._code = 0
        return self._code

    def wait(self, timeout: float) -> int:
        """Wait until all processes have ended. If one fails, the others are killed after 30 seconds, as by torchrun.

        Raises:
            subprocess.TimeoutExpired: `timeout` seconds have passed.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout, *self._read())
            wait([process.sentinel for process in self._processes if process.exitcode is None], 1)
        self.kill(after=30)
        return code

    def kill(self, after: float = 0) -> int | None:
        """Kill the processes that have not ended after `after` seconds, and return the exit code as `poll` does."""
        for process in self._processes:
            process.join(after)
            process.kill()
            process.join()
        return self.poll()

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Wait until all processes have ended, and return their stdout and stderr."""
        self.wait(timeout)
        return self._read()

    def send_signal(self, number: int) -> None:
        for process in self._processes:
            os.kill(process.pid or 0, number)

    def _read(self) -> tuple[str, str]:
        out, err = (path.read_text() for path in self._files)
        return out, err


@dataclass(frozen=True)
class SignalAtCall:
    """Sends a signal to this process when a Python function is called.

    Attributes:
        function: qualified name without the module, such as `Trainer.step`.
        number: which call of this function, from 1.
        in_threads: whether to watch threads that start later, in addition to the thread that installs it.
    """

    function: str
    number: int
    signal: int = signal.SIGKILL
    in_threads: bool = False

    def install(self) -> None:
        """Watch all calls from now on."""
        left = self.number

        def watch(frame: FrameType, event: str, _: object) -> None:
            nonlocal left
            if event == "call" and frame.f_code.co_qualname == self.function:
                left -= 1
                if left == 0:
                    sys.setprofile(None)
                    os.kill(os.getpid(), self.signal)

        sys.setprofile(watch)
        if self.in_threads:
            threading.setprofile(watch)


def start_swiftlite(
    argv: Sequence[str],
    directory: Path,
    environments: Sequence[Mapping[str, str]],
    out: Path,
    err: Path,
    signal_at: SignalAtCall | None = None,
    pages: bool = False,
) -> Running:
    """Start `swiftlite argv` in `directory`, one process per environment. Output is appended to `out` and `err`.

    Args:
        pages: whether runs write run_report.html, which takes a quarter of the time of a run of a few steps.
    """
    processes = []
    for environment in environments:
        words = (argv, directory, out, err, environment, signal_at, pages)
        process = forkserver().Process(target=_become_swiftlite, args=words)
        process.start()
        processes.append(process)
    return Running(argv, processes, out, err)


def _become_swiftlite(
    argv: Sequence[str],
    directory: Path,
    out: Path,
    err: Path,
    environment: Mapping[str, str],
    signal_at: SignalAtCall | None,
    pages: bool,
):
    gc.freeze()  # otherwise every collection visits all modules, which takes half a second
    os.setsid()  # so that a signal to its group reaches what it starts, and nothing else
    os.environ.clear()
    os.environ.update(environment)
    if not pages:
        from swiftlite.train import phases

        phases.write_page = lambda run: None
    if signal_at:
        signal_at.install()
    run_swiftlite(argv, directory, out, err)


def run_swiftlite(argv: Sequence[str], directory: Path, out: Path, err: Path) -> None:
    """Do what `python -W ignore -m swiftlite argv` does in this process, and end it."""
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
    """A process that imports additional modules, and forks another process for each call.

    Args:
        modules: names of modules; none of them may start a thread.
        environment: environment variables that are added before the imports.
        prepare: function at the top level of a module, called after the imports.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], prepare: Callable[[], None] | None = None
    ):
        self._connection, theirs = multiprocessing.Pipe()
        self._process = forkserver().Process(target=_host, args=(theirs, modules, environment, prepare))
        self._process.start()
        theirs.close()

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 600) -> Any:
        """Return the result of `function(*args)` in a separate process, or the exit code if it ends its process.

        Args:
            function: a function at the top level of a module.
            args: arguments that can be pickled; the result must be picklable too.

        Raises:
            RuntimeError: the process failed; the error contains its traceback.
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
    gc.disable()  # collections would only visit modules, in a fifth of the time that the imports take
    for name in modules:
        importlib.import_module(name)
    if prepare:
        prepare()
    gc.freeze()
    gc.enable()
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
    # The caller may read the output files as soon as it has the answer, before this process exits and flushes.
    sys.stdout.flush()
    sys.stderr.flush()
    caller.send_bytes(answer)
