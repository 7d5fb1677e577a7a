"""Test `swiftlite report --serve` over HTTP, in a browser and as a process."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import pytest

from swiftlite.cli.main import main
from swiftlite.report.live import ADDRESS, server_of
from tests.browser import CHROMIUM, HOW_TO_GET_IT
from tests.messages import mentions
from tests.report.files import HOSTILE, write_run
from tests.report.look import listen


@contextmanager
def served(*directories: Path) -> Iterator[int]:
    """Serve the pages of runs; yield the port."""
    with server_of(directories, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def get(port: int, path: str = "/", **headers: str) -> tuple[int, str, str]:
    """Return status, ETag and text of an answer."""
    connection = HTTPConnection(ADDRESS, port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("ETag", ""), answer.read().decode()
    finally:
        connection.close()


def add_step(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 0.5}) + "\n")


def test_a_page_changes_with_the_files_of_its_run(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "run_report.json").unlink()  # the run is in progress
    with served(run) as port:
        status, version, text = get(port)
        assert (status, "6 steps are complete" in text) == (200, True)
        assert get(port, **{"If-None-Match": version}) == (304, version, "")
        add_step(run, 7)
        status, later, text = get(port, **{"If-None-Match": version})
        assert (status, "7 steps are complete" in text) == (200, True)
        assert later != version


def test_several_runs_are_compared_and_have_their_own_pages(tmp_path):
    runs = [write_run(tmp_path / "first"), write_run(tmp_path / "second", steps=8)]
    with served(*runs) as port:
        links = re.findall(r'<a href="([^"]+)">([^<]+)</a>', get(port)[2])
        assert links == [("/", "Comparison"), ("/1", "first"), ("/2", "second")]
        assert "<title>Run: second</title>" in get(port, "/2")[2]
        assert get(port, "/3")[0] == 404
        assert get(port, "/../first/args.json")[0] == 404


def test_another_website_cannot_read_the_pages(tmp_path):
    """A website can let its own name resolve to 127.0.0.1, and then request the pages from the visitor's browser."""
    with served(write_run(tmp_path / "run")) as port:
        assert get(port, Host=f"example.com:{port}")[0] == 403
        assert get(port, Host=f"localhost:{port}")[0] == 200


def test_a_modified_file_is_an_error_of_one_request(tmp_path):
    run = write_run(tmp_path / "run")
    report = (run / "run_report.json").read_bytes()
    with served(run) as port:
        (run / "run_report.json").write_text('{"data": {"total": 3}}')
        assert get(port)[0] == 500
        (run / "run_report.json").write_bytes(report)
        assert get(port)[0] == 200


def test_a_browser_that_closes_its_connection_is_no_error(tmp_path, capfd):
    run = write_run(tmp_path / "run", steps=1000)
    with served(run) as port:
        connection = socket.create_connection((ADDRESS, port))
        # No time to send the rest: the connection is reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(f"GET / HTTP/1.1\r\nHost: {ADDRESS}\r\n\r\n".encode())
        connection.close()
        assert get(port)[0] == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--serve", "--output", "x.html"], "--output --serve"),
        (["--port", "6007"], "--port --serve"),
        (["--serve", "--port", "0"], "--port"),
    ],
)
def test_options_that_do_not_fit(tmp_path, monkeypatch, capsys, argv, problem):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    assert main(["report", "run", *argv]) == 2
    assert mentions(capsys.readouterr().err, problem)


def test_a_port_that_is_taken(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    with served(run) as port:
        assert main(["report", str(run), "--serve", "--port", str(port)]) == 1
        assert mentions(capsys.readouterr().err, f"--port {port}")


def test_ctrl_c_ends_the_command(tmp_path):
    run = write_run(tmp_path / "run")
    with served(run) as free:
        pass
    command = [sys.executable, "-m", "swiftlite", "report", str(run), "--serve", "--port", str(free)]
    # A shell without job control starts programs in the background, such as this test, with SIGINT ignored.
    handle = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(Path.cwd())}, preexec_fn=handle)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                assert get(free)[0] == 200
                break
            except ConnectionRefusedError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(CHROMIUM is None, reason=HOW_TO_GET_IT)
def test_an_open_page_is_updated(browser, tmp_path):
    run = write_run(tmp_path / "run", text=HOSTILE)
    (run / "run_report.json").unlink()
    lead = "document.querySelector('.lead').textContent"
    stale = "document.querySelector('.stale').hidden"
    opened = "document.querySelector('details').open"
    with served(run) as port:
        browser.open(f"http://{ADDRESS}:{port}/", width=1280)
        listen(browser)
        browser.evaluate(f"{opened} = true")
        assert "6 steps" in browser.evaluate(lead)
        add_step(run, 7)
        wait_until(browser, f"{lead}.includes('7 steps')")
        assert browser.evaluate(opened) is True
        assert browser.evaluate(stale) is True
        assert browser.evaluate("document.querySelectorAll('script').length") == 1
    wait_until(browser, f"!{stale}")
    browser.open("about:blank", width=1280)  # the page would continue to ask
    browser.requests.clear()
    browser.errors.clear()


def wait_until(browser, condition: str) -> None:
    deadline = time.monotonic() + 60
    while not browser.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.2)
