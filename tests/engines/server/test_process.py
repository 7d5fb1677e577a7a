"""Test a server's process: waiting for it, stopping it with its children, and its log in errors."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import psutil
import pytest

from swiftlite.base.errors import UserError
from swiftlite.engines.server import process as server
from swiftlite.engines.server_command import ServerCommand
from tests.messages import mentions

# Serves /health after a start; `child` is a process that would outlive it, `stubborn` one that does not stop.
SCRIPT = """
import http.server, os, signal, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["NAME"].encode())
if "child" in sys.argv:
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "shares" in sys.argv:
    http.server.HTTPServer.allow_reuse_port = True
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
COMMAND = [sys.executable, "-c", SCRIPT, "--port", "0"]


def start(tmp_path, *words: str):
    return server.serve(ServerCommand([*COMMAND, *words], {"NAME": "x"}), tmp_path / "log")


def test_nothing_is_left_of_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there
    with start(tmp_path, "child") as running:
        assert running.process.poll() is None
        child = int(running.log.read_text().splitlines()[0])
        assert psutil.pid_exists(child)
    assert running.process.poll() is not None
    wait_until_ended(child)


@pytest.mark.parametrize("words", [["child"], ["child", "stubborn"]])
def test_nothing_is_left_of_a_server_when_its_starter_is_killed(tmp_path, words):
    starter = f"""
import pathlib, sys, time
from swiftlite.engines.server import process as server
from swiftlite.engines.server_command import ServerCommand
command = ServerCommand([*{COMMAND!r}, *{words!r}], {{"NAME": "x"}})
with server.serve(command, pathlib.Path({str(tmp_path / "log")!r})) as running:
    print(running.process.pid, flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    warden = psutil.Process(int(process.stdout.readline()))
    started = [warden, *warden.children(recursive=True)]
    assert len(started) == 3
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    for each in started:
        wait_until_ended(each.pid)


def wait_until_ended(pid: int) -> None:
    deadline = time.monotonic() + 30  # whoever adopted it has yet to reap it
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_does_not_stop_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "SECONDS_TO_STOP", 0.2)
    with start(tmp_path, "stubborn") as running:
        pass
    assert running.process.returncode == -9


def test_a_server_that_does_not_start_is_quoted(tmp_path):
    script = "import sys; print(*range(40), sep='\\n'); sys.exit('no memory')"
    command = ServerCommand([sys.executable, "-c", script, "--port", "0"])
    with pytest.raises(UserError) as caught, server.serve(command, tmp_path / "log"):
        pass
    assert mentions(caught.value.problem.splitlines()[0], "1")
    assert "no memory" in caught.value.problem
    assert caught.value.problem.count("\n") == server.LINES_TO_SHOW
    assert str(tmp_path / "log") in caught.value.hint


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nforeign"


@contextlib.contextmanager
def foreign(monkeypatch, attempts=1, is_listening=True, shares=False, response=OK):
    """Let another process take the port, for the first attempts, after it was found to be free; yield its port."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
        taken.bind(("127.0.0.1", 0))
        port, found = taken.getsockname()[1], server.free_port
        if is_listening:
            taken.listen()
            threading.Thread(target=answer, args=(taken, response), daemon=True).start()
        ports = [port] * attempts
        monkeypatch.setattr(server, "free_port", lambda: ports.pop() if ports else found())
        yield port
        taken.close()


def answer(listening: socket.socket, response: bytes) -> None:
    with contextlib.suppress(OSError):  # closed
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(response)


@pytest.mark.parametrize("kind", ["listens", "speaks SSH", "is bound", "shares"])
def test_a_server_whose_port_was_taken_gets_another_one(tmp_path, monkeypatch, kind):
    """The other process responds at /health while the server starts, perhaps not in HTTP; or it only holds the port; or
    both listen.
    """
    shares = kind == "shares"
    words = ["shares"] if shares else []
    response = b"SSH-2.0-OpenSSH_9.6\r\n" if kind == "speaks SSH" else OK
    with (
        foreign(monkeypatch, is_listening=kind != "is bound", shares=shares, response=response) as port,
        start(tmp_path, *words) as running,
        urllib.request.urlopen(running.url, timeout=30) as response,
    ):
        assert response.read() == b"x"
        assert not running.url.endswith(f":{port}")
        assert running.url.rsplit(":", 1)[1] in running.command.words


def test_a_server_whose_ports_are_all_taken(tmp_path, monkeypatch):
    with (
        foreign(monkeypatch, server.ATTEMPTS),
        pytest.raises(UserError) as caught,
        start(tmp_path),
    ):
        pass
    assert mentions(caught.value.problem, str(server.ATTEMPTS))
