"""A local server with the protocol of S3, and the environment with which clients find it."""

import http.client
import itertools
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from swiftlite.store.objects import ObjectStore

_NUMBERS = itertools.count()  # of all servers, because moto keeps its objects when a server ends


@dataclass
class S3:
    """A running server with one bucket."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }

    def new_url(self) -> str:
        """Return a URL that no test uses."""
        return f"s3://bucket/run-{next(_NUMBERS)}"


@contextmanager
def s3_server() -> Iterator[S3]:
    """Run a server until the context ends."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        found = S3(f"http://{host}:{port}")
        request = urllib.request.Request(f"{found.endpoint}/bucket", method="PUT")
        urllib.request.urlopen(request).close()
        yield found
    finally:
        server.stop()


def content_of(url: str) -> dict[str, bytes]:
    """Return the objects below a URL."""
    objects = ObjectStore.open(url)
    return {name: objects.read(name) for name in objects.list()}


class FaultyLine(ThreadingHTTPServer):
    """A proxy between a client and a server that flips one bit of some contents.

    Attributes:
        damages: number of contents to damage, by method and part of the path.
        is_down: whether connections are closed without an answer.
    """

    daemon_threads = True

    def __init__(self, server: S3, port: int = 0):
        super().__init__(("127.0.0.1", port), _Forward)
        self.target = server.endpoint.removeprefix("http://")
        self.damages: dict[tuple[str, str], int] = {}
        self.is_down = False

    def carry(self, method: str, path: str, content: bytes) -> bytes:
        for (damaged_method, part), number in self.damages.items():
            if number and method == damaged_method and part in path and content:
                self.damages[damaged_method, part] -= 1
                return bytes([content[0] ^ 1]) + content[1:]
        return content


class _Forward(BaseHTTPRequestHandler):
    def handle_one_request(self):
        line: FaultyLine = self.server  # type: ignore[assignment]
        self.raw_requestline = self.rfile.readline(65537)
        if line.is_down or not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.command == "PUT":
            body = line.carry("PUT", self.path, body)
        target = http.client.HTTPConnection(line.target)
        target.request(self.command, self.path, body, dict(self.headers))
        answer = target.getresponse()
        content = answer.read()
        if self.command == "GET":
            content = line.carry("GET", self.path, content)
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", answer.getheader("Content-Length") or str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = True


@contextmanager
def faulty_line(server: S3, port: int = 0) -> Iterator[FaultyLine]:
    """Run a proxy for a server until the context ends, on a free port by default."""
    with FaultyLine(server, port) as line:
        thread = threading.Thread(target=line.serve_forever, daemon=True)
        thread.start()
        try:
            yield line
        finally:
            line.shutdown()
