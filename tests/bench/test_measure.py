"""One server, measured; real ones are in tests/e2e/test_bench.py."""

import sys

import pytest

pytest.importorskip("aiohttp")

from swiftlite.args.commands import BenchArgs
from swiftlite.bench.measure import measure
from swiftlite.bench.server import free_url
from swiftlite.engines.engine import Sampling
from swiftlite.engines.server_command import ServerCommand
from swiftlite.errors import UserError


def test_a_server_that_dies_while_it_is_asked(tmp_path):
    script = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("out of memory", flush=True)
        os._exit(3)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
    url, port = free_url()
    command = ServerCommand([sys.executable, "-c", script, str(port)])
    with pytest.raises(UserError, match=r"the server stopped answering: [^|]*its log ends so:[^~]*out of memory"):
        measure(BenchArgs(concurrency=[1, 2]), 0, url, command, [[1], [2]], Sampling(4), tmp_path / "log")
