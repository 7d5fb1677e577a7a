"""Start the servers of `bench`: one after another, or all at once where their memory suffices."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from swiftlite.base.redact import redact_text
from swiftlite.engines.server.process import Server, launch, serve
from swiftlite.engines.server_command import ServerCommand
from swiftlite.families.resolved import HfModel
from swiftlite.runtime.environment import sees_gpu

MEMORY_PER_SERVER = 4e9
"""Bytes that a server needs besides its weights: Python with torch, the KV cache (1 GB in vLLM on a CPU), and
activations."""


@dataclass(frozen=True)
class RunningServer:
    """A server that accepts requests.

    Attributes:
        command: its command line, with keys replaced by ***.
        seconds_to_start: seconds from its start until it was healthy; for servers that are started together, until it
            and those before it were.
    """

    server: Server
    command: str
    seconds_to_start: float


GetServer = Callable[[int], RunningServer]
"""A function that returns the running server with a number of draft tokens."""


def fit_together(model: HfModel, number: int) -> bool:
    """Return whether `number` servers of a model can run at the same time: not on a GPU, because each server fills its
    memory; and only with enough free memory for twice the size of the model's files, which are mostly in 16 bits.
    """
    if sees_gpu():
        return False
    size = sum(path.stat().st_size for path in model.directory.glob("*.safetensors"))
    return number * (2 * size + MEMORY_PER_SERVER) < psutil.virtual_memory().available


@contextmanager
def one_at_a_time(commands: Mapping[int, ServerCommand], logs: Path) -> Iterator[GetServer]:
    """Yield a function that starts a server and stops the previous one. A server can be started a second time.

    Args:
        commands: command of the server, by number of draft tokens.
        logs: directory for the servers' output.
    """
    with ExitStack() as stack:

        def get(number: int) -> RunningServer:
            stack.close()
            log = logs / f"server_{number}.log"
            if log.exists():
                log = logs / f"server_{number}_again.log"
            begin = time.perf_counter()
            server = stack.enter_context(serve(commands[number], log))
            return _running(server, begin)

        yield get


@contextmanager
def all_together(commands: Mapping[int, ServerCommand], logs: Path) -> Iterator[GetServer]:
    """Start all servers at once, because most of a start uses one core, and yield a function that returns one of them.

    A server that waits for requests uses no processor time. For the arguments, see `one_at_a_time`.

    Raises:
        UserError: a server ended before it was healthy.
    """
    with ExitStack() as stack:
        begin = time.perf_counter()
        servers = {}
        for number, command in commands.items():
            servers[number] = stack.enter_context(launch(command, logs / f"server_{number}.log"))
        running = {}
        for number, server in servers.items():
            server.wait_until_healthy()
            running[number] = _running(server, begin)
        yield running.__getitem__


def _running(server: Server, begin: float) -> RunningServer:
    line = redact_text(server.command.redacted().shell_line())
    return RunningServer(server, line, time.perf_counter() - begin)
