"""Start vLLM servers, and send requests to them."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def running(command: Sequence[str], log: Path, directory: Path | None = None) -> Iterator[subprocess.Popen]:
    """Start a server in a directory, and stop it at the end of the context."""
    with log.open("w") as stream:
        server = subprocess.Popen(
            command,
            cwd=directory,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
            start_new_session=True,
        )
        try:
            yield server
        finally:
            if server.poll() is None:
                server.terminate()
                server.wait(timeout=60)
            # Of a server that a test has killed during an update, vLLM's processes wait for the rest of the update.
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


def get(url: str, content: dict | None = None, key: str = "") -> str:
    body = None if content is None else json.dumps(content).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read().decode()


def wait_for_health(server: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            get(f"{url}/health")
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])
