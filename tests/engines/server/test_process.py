"""Test a server's process: waiting for it, stopping it with its children, and its log in errors."""

import os
import signal
import subprocess
import sys
import time

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
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start(tmp_path, *words: str):
    url, port = server.free_url()
    return server.serve(
        ServerCommand([sys.executable, "-c", SCRIPT, str(port), *words], {"NAME": "x"}), url, tmp_path / "log"
    )


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
url, port = server.free_url()
command = ServerCommand([sys.executable, "-c", {SCRIPT!r}, str(port), *{words!r}], {{"NAME": "x"}})
with server.serve(command, url, pathlib.Path({str(tmp_path / "log")!r})) as running:
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
    url, _ = server.free_url()
    with (
        pytest.raises(UserError) as caught,
        server.serve(ServerCommand([sys.executable, "-c", script]), url, tmp_path / "log"),
    ):
        pass
    assert mentions(caught.value.problem.splitlines()[0], "1")
    assert "no memory" in caught.value.problem
    assert caught.value.problem.count("\n") == server.LINES_TO_SHOW
    assert str(tmp_path / "log") in caught.value.hint
