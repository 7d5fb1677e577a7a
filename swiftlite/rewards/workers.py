"""Call a function for each of several values, in processes with a time limit for each value.

A function is named by its module and its name, and only the processes import it.
"""

import importlib
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from swiftlite.runtime.parent import exit_with_parent

MAX_PROCESSES = 8
MAX_MEMORY = 2 * 1024**3
"""Bytes that a worker can allocate."""
START_SECONDS = 120.0
_CONTEXT = multiprocessing.get_context("forkserver")
"""Workers are forked from a process that has imported the function's module, but no threads: a fork of the caller could
inherit a lock of a thread of the user's functions."""


def num_processes() -> int:
    """Return how many processes run at the same time."""
    return min(MAX_PROCESSES, os.cpu_count() or 1)


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    position: int = 0
    end: float = 0.0

    def give(self, position: int, value: Any, seconds: float) -> None:
        self.position, self.end = position, time.monotonic() + seconds
        self.pipe.send(value)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def map_in_time(module: str, function: str, values: Sequence[Any], seconds: float, late: Any) -> list[Any]:
    """Return the function's result for each value, and `late` for a value that takes longer or ends its process."""
    _CONTEXT.set_forkserver_preload([module])
    results = [late] * len(values)
    waiting = iter(enumerate(values))
    workers = [worker for _ in range(num_processes()) for worker in _start(module, function, waiting, seconds)]
    try:
        while workers:
            next_end = min(worker.end for worker in workers)
            ready = wait([worker.pipe for worker in workers], max(next_end - time.monotonic(), 0))
            for worker in list(workers):
                if worker.pipe in ready and _receive(worker, results) and (item := next(waiting, None)):
                    worker.give(*item, seconds)
                elif worker.pipe in ready or time.monotonic() >= worker.end:
                    worker.stop()
                    workers.remove(worker)
                    workers += _start(module, function, waiting, seconds)
    finally:
        for worker in workers:
            worker.stop()
    return results


def _start(module: str, function: str, waiting: Iterator[tuple[int, Any]], seconds: float) -> list[_Worker]:
    """Return a worker for the next value; empty if all values have been given out.

    Raises:
        RuntimeError: the worker does not start, so its value would be scored as if it took too long.
    """
    item = next(waiting, None)
    if item is None:
        return []
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_work, args=(module, function, theirs), daemon=True)
    process.start()
    theirs.close()  # so that the end of the worker is noticed
    worker = _Worker(process, ours)
    try:
        if not ours.poll(START_SECONDS):
            raise EOFError
        ours.recv()
    except EOFError:
        worker.stop()
        raise RuntimeError("a worker process does not start; its error is in the log") from None
    worker.give(*item, seconds)
    return [worker]


def _receive(worker: _Worker, results: list[Any]) -> bool:
    """Store a result; return False if the worker has ended."""
    try:
        results[worker.position] = worker.pipe.recv()
    except (EOFError, OSError):
        return False
    return True


def limit_memory() -> None:
    """Limit the memory that this process can allocate from now on to `MAX_MEMORY`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MAX_MEMORY
    if pages and (most == resource.RLIM_INFINITY or limit < most):
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def _work(module: str, function: str, pipe: Connection) -> None:
    """Answer with the function's results until an exception or a kill ends this process."""
    exit_with_parent(os.getppid())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # sent to all processes of a run; the trainer decides
        signal.signal(number, signal.SIG_IGN)
    limit_memory()
    call = getattr(importlib.import_module(module), function)
    pipe.send(None)  # ready: imports do not count towards the time of the first value
    while True:
        pipe.send(call(pipe.recv()))
