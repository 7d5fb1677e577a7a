"""Test the measurement of one server with a small server. tests/e2e/test_bench.py uses real engines."""

import asyncio
import sys

import pytest

from swiftlite.args.commands import BenchArgs
from swiftlite.base.errors import UserError
from swiftlite.engines.client import Answer
from swiftlite.engines.engine import Sampling
from swiftlite.engines.server.process import free_url
from swiftlite.engines.server_command import ServerCommand
from swiftlite.serve.bench.measure import generate_all, measure, warm_up_prompts
from swiftlite.serve.bench.servers import all_together, one_at_a_time


@pytest.mark.parametrize("start", [one_at_a_time, all_together])
def test_a_server_that_dies_while_it_is_asked(tmp_path, start):
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
    with start({0: command}, {0: url}, tmp_path) as get, pytest.raises(UserError, match="out of memory"):
        measure(BenchArgs(concurrency=[1, 2]), 0, get(0), [[1], [2]], Sampling(4))


class Counting:
    """A client that answers later prompts sooner, and counts the requests in flight."""

    def __init__(self):
        self.under_way, self.most = 0, 0

    async def answer(self, prompt, salt):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.02 / prompt[0])
        self.under_way -= 1
        return Answer(f"{prompt[0]} {salt}", 1, 0.0, 0.0)

    async def draft_counts(self):
        raise NotImplementedError

    async def cached_tokens(self):
        raise NotImplementedError


def test_prompts_are_answered_in_order_so_many_at_once():
    client = Counting()
    done = asyncio.run(generate_all(client, [[number] for number in range(1, 8)], 3, "x"))
    assert [answer.text for answer in done.answers] == [f"{number} x" for number in range(1, 8)]
    assert client.most == 3
    assert done.seconds > 0


def test_few_prompts_warm_a_server_up():
    """With --repeat_prompts, all prompts must be in the prefix cache before the measurement."""
    prompts = [[number] for number in range(16)]
    assert warm_up_prompts(BenchArgs(concurrency=[1]), prompts) == prompts[:2]
    assert warm_up_prompts(BenchArgs(concurrency=[1, 4]), prompts) == prompts[:8]
    assert warm_up_prompts(BenchArgs(concurrency=[16]), prompts) == prompts
    assert warm_up_prompts(BenchArgs(concurrency=[1], repeat_prompts=True), prompts) == prompts


@pytest.mark.parametrize(("seconds", "least", "number"), [(None, 0, 7), (0.0, 0, 0), (0.0, 5, 5), (600.0, 0, 7)])
def test_a_limit_of_time_leaves_out_the_last_prompts(seconds, least, number):
    done = asyncio.run(generate_all(Counting(), [[1]] * 7, 2, "x", (seconds, least)))
    assert len(done.answers) == number
