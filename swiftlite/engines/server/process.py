"""Run an engine's server as a subprocess, and stop all of its processes at the end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swiftlite.base.direct import DIRECT
from swiftlite.base.errors import UserError
from swiftlite.engines.server_command import ServerCommand

# Time to drain in-flight requests and stop workers; vLLM on a CPU takes 2 s.
SECONDS_TO_STOP = 60
LINES_TO_SHOW = 15


@dataclass
class Server:
    """The process of a server.

    Attributes:
        url: address at which the server listens.
        log: file with the server's output.
        was_healthy: whether `wait_until_healthy` has succeeded.
    """

    process: subprocess.Popen
    url: str
    log: Path
    was_healthy: bool = False

    def wait_until_healthy(self) -> None:
        """Wait until the server accepts requests.

        Raises:
            UserError: the server ended before.
        """
        while not _is_healthy(self.url):
            if self.process.poll() is not None:
                raise self.failure(f"the server ended with code {self.process.returncode} before it was ready")
            time.sleep(0.5)
        self.was_healthy = True

    def failure(self, what: str) -> UserError:
        """Return the error of a failed server, with the end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_TO_SHOW:]
        tail = "".join(f"\n    | {line}" for line in lines)
        return UserError(f"{what}; end of its log:{tail}", f"see {self.log}")


@contextlib.contextmanager
def serve(command: ServerCommand, url: str, log: Path) -> Iterator[Server]:
    """Start a server, wait until it is healthy, and stop it with its child processes, even if this process is killed.

    Args:
        command: command of a server that listens at `url`.
        log: file for the server's output.

    Raises:
        UserError: the server ended before it was healthy.
    """
    with launch(command, url, log) as server:
        server.wait_until_healthy()
        yield server


@contextlib.contextmanager
def launch(command: ServerCommand, url: str, log: Path) -> Iterator[Server]:
    """Start a server like `serve`, without waiting until it is healthy."""
    with log.open("wb") as stream:
        # In a separate session, so that Ctrl-C reaches only this process, and remaining children can be found.
        process = subprocess.Popen(
            [sys.executable, "-m", "swiftlite.engines.server.watchdog", str(os.getpid()), *command.words],
            # Unbuffered, so that the log is in chronological order, with errors at the end.
            env={**os.environ, "PYTHONUNBUFFERED": "1", **command.variables},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, url, log)
    try:
        yield server
    finally:
        patience = SECONDS_TO_STOP if server.was_healthy else 0  # a starting server has no requests to drain
        _stop(process, patience)


def free_url() -> tuple[str, int]:
    """Return a free address and its port."""
    return free_urls(1)[0]


def free_urls(number: int) -> list[tuple[str, int]]:
    """Return different free addresses and their ports."""
    with contextlib.ExitStack() as probes:
        ports = []
        for _ in range(number):
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    return [(f"http://127.0.0.1:{port}", port) for port in ports]


def _is_healthy(url: str) -> bool:
    try:
        with DIRECT.open(f"{url}/health", timeout=30) as response:
            return response.status == 200
    except OSError:  # not listening, or not healthy yet
        return False


def _stop(process: subprocess.Popen, patience: float) -> None:
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    finally:  # also at a second Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
