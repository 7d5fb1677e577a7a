"""Run an engine's server as a subprocess, and stop all of its processes at the end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import psutil

from swiftlite.base.direct import DIRECT
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.engines.server_command import ServerCommand

# Time to drain in-flight requests and stop workers; vLLM on a CPU takes 2 s.
SECONDS_TO_STOP = 60
LINES_TO_SHOW = 15
ATTEMPTS = 4
"""Number of ports at which a server is started."""


class Server:
    """The process of a server, at a port of this machine that was free.

    Another process can take the port until the server listens there, which is after it has loaded its model. The server
    is then started again at another port, at most `ATTEMPTS` times.

    Attributes:
        command: command of the server, with its port.
        url: address at which the server listens.
        process: the process that runs it.
        log: file with the server's output.
        hint: hint of `failure`.
        was_healthy: whether `wait_until_healthy` has succeeded.
    """

    def __init__(self, command: ServerCommand, log: Path, hint: str | None = None):
        self.log = log
        self.hint = f"see {log}" if hint is None else hint
        self._start(command)

    def _start(self, command: ServerCommand) -> None:
        self._port = free_port()
        self.command = command.with_port(self._port)
        self.url = f"http://127.0.0.1:{self._port}"
        self.was_healthy = False
        with self.log.open("wb") as stream:
            # In a separate session, so that Ctrl-C reaches only this process, and remaining children can be found.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "swiftlite.engines.server.watchdog", str(os.getpid()), *self.command.words],
                # Unbuffered, so that the log is in chronological order, with errors at the end.
                env={**os.environ, "PYTHONUNBUFFERED": "1", **command.variables},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_healthy(self) -> None:
        """Wait until the server accepts requests.

        Raises:
            UserError: the server ended before, or other processes took its ports.
        """
        for _ in range(ATTEMPTS - 1):
            if self._owns_port_when_healthy():
                return
            logger.warning("another process took port %d; the server is started again at another one", self._port)
            self.stop()
            self._start(self.command)
        if not self._owns_port_when_healthy():
            raise self.failure(f"other processes took {ATTEMPTS} ports before the server listened there")

    def failure(self, what: str) -> UserError:
        """Return the error of a failed server, with the end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_TO_SHOW:]
        tail = "".join(f"\n    | {line}" for line in lines)
        return UserError(f"{what}; end of its log:{tail}", self.hint)

    def stop(self) -> None:
        """Stop the server and all of its processes."""
        patience = SECONDS_TO_STOP if self.was_healthy else 0  # a starting server has no requests to drain
        try:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        finally:  # also at a second Ctrl-C
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _owns_port_when_healthy(self) -> bool:
        """Wait until the address responds, and return whether only this server listens there.

        vLLM and llama.cpp share their port with other processes of the user that do so too (SO_REUSEPORT). Without
        the check, some requests would then reach a foreign server.

        Raises:
            UserError: the server ended, although its port was free.
        """
        # Without a time limit: loading and compiling a large model can take an hour, and a server that fails ends.
        while not _is_healthy(self.url):
            if self.process.poll() is not None:
                if not _is_free(self._port):
                    return False
                raise self.failure(f"the server ended with code {self.process.returncode} before it was ready")
            time.sleep(0.5)
        self.was_healthy = all(_is_in_session(pid, self.process.pid) for pid in _listeners(self._port))
        return self.was_healthy


@contextlib.contextmanager
def serve(command: ServerCommand, log: Path, hint: str | None = None) -> Iterator[Server]:
    """Start a server, wait until it is healthy, and stop it with its child processes, even if this process is killed.

    Args:
        command: command of a server that listens on this machine. Its port is replaced by a free one (`Server.url`).
        log: file for the server's output.
        hint: hint of errors of the server. Default: the log.

    Raises:
        UserError: the server ended before it was healthy.
    """
    with launch(command, log, hint) as server:
        server.wait_until_healthy()
        yield server


@contextlib.contextmanager
def serve_with_short_log(command: ServerCommand, what: str, hint: str = "") -> Iterator[Server]:
    """Start a server like `serve`, with a log that is deleted at the end.

    Raises:
        UserError: the server ended before it was healthy. The problem begins with `what`.
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="swiftlite-server-"))
        try:
            server = stack.enter_context(serve(command, Path(directory) / "server.log", hint))
        except UserError as error:
            raise UserError(f"{what}: {error.problem}", hint) from None
        yield server


@contextlib.contextmanager
def launch(command: ServerCommand, log: Path, hint: str | None = None) -> Iterator[Server]:
    """Start a server like `serve`, without waiting until it is healthy."""
    server = Server(command, log, hint)
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as probe:
        # On all interfaces, because the server may listen on all of them.
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that were closed do not count
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _listeners(port: int) -> set[int | None]:
    """Return the ids of the processes that listen at a port; None for those of another user."""
    try:
        sockets = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS shows them only to root
        return set()
    listening = [each for each in sockets if each.status == psutil.CONN_LISTEN]
    return {each.pid for each in listening if each.laddr and each.laddr.port == port}


def _is_in_session(pid: int | None, session: int) -> bool:
    try:
        return pid is not None and os.getsid(pid) == session
    except ProcessLookupError:  # has ended
        return True


def _is_healthy(url: str) -> bool:
    try:
        with DIRECT.open(f"{url}/health", timeout=30) as response:
            return response.status == 200
    except (OSError, HTTPException):  # not listening, not healthy yet, or a foreign process without HTTP
        return False
