"""Test the measurement of servers with small servers. tests/e2e/test_bench.py uses real engines."""

import asyncio
import sys
from types import SimpleNamespace
from typing import cast

import pytest

from swiftlite.args.commands import BenchArgs
from swiftlite.base.errors import UserError
from swiftlite.engines.client import Answer, Client
from swiftlite.engines.engine import Sampling
from swiftlite.engines.server_command import ServerCommand
from swiftlite.serve.bench.measure import (
    Measurement,
    Target,
    generate_all,
    measure,
    run_round,
    warm_up_prompts,
)
from swiftlite.serve.bench.servers import all_together, one_at_a_time

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        {answer}
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""
DYING = SERVER.format(answer='print("out of memory", flush=True); os._exit(3)')
LIVING = SERVER.format(answer="pass")


@pytest.mark.parametrize("start", [one_at_a_time, all_together])
def test_a_server_that_dies_while_it_is_asked(tmp_path, start):
    command = ServerCommand([sys.executable, "-c", DYING, "--port", "0"])
    with start({0: command}, tmp_path) as get, pytest.raises(UserError, match="out of memory"):
        asyncio.run(measure(BenchArgs(concurrency=[1, 2]), [Target(0, get(0))], [[1], [2]], Sampling(4), None, print))


def test_the_server_that_died_is_named(tmp_path):
    """The first of two servers ends; the error shows the end of its log."""
    scripts = {0: DYING, 1: LIVING}
    commands = {k: ServerCommand([sys.executable, "-c", script, "--port", "0"]) for k, script in scripts.items()}
    with all_together(commands, tmp_path) as get:
        targets = [Target(0, get(0)), Target(1, get(1))]
        with pytest.raises(UserError, match="out of memory"):
            asyncio.run(measure(BenchArgs(concurrency=[1]), targets, [[1]], Sampling(4), None, print))


class Counting(Client):
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


class Recording(Counting):
    """A client that records the prompts of all servers in the order of their arrival."""

    def __init__(self, name, seen):
        super().__init__()
        self.name, self.seen = name, seen

    async def answer(self, prompt, salt):
        self.seen.append(f"{self.name}{prompt[0]}")
        return await super().answer(prompt, salt)

    async def cached_tokens(self):
        return 3 * len(self.seen)


def take_turns(numbers, concurrency, limit=(None, 0)):
    seen: list[str] = []
    target = cast(Target, SimpleNamespace(running=SimpleNamespace(server=None), salt=""))
    servers = [Measurement(target, Recording(name, seen)) for name in "AB"]
    number = asyncio.run(run_round(servers, [[each] for each in numbers], concurrency, "x", limit))
    assert [len(server.rounds[0].answers) for server in servers] == [number] * 2
    return seen, servers


def test_servers_that_run_at_the_same_time_answer_in_turn():
    seen, servers = take_turns([1, 2, 3], 1)
    assert seen == ["A1", "B1", "A2", "B2", "A3", "B3"]
    # Only the time and the cached tokens of a server's own turns count.
    assert [server.cached_tokens for server in servers] == [9, 9]
    assert all(0 < server.rounds[0].seconds < 1 for server in servers)
    seen, _ = take_turns(range(1, 11), 2)
    turns = [("A", range(1, 9)), ("B", range(1, 9)), ("A", (9, 10)), ("B", (9, 10))]
    assert seen == [f"{name}{number}" for name, numbers in turns for number in numbers]


@pytest.mark.parametrize(("limit", "number"), [((0.0, 2), 2), ((600.0, 1), 5), ((0.0, 0), 0)])
def test_a_limit_of_time_is_the_same_for_all_servers(limit, number):
    seen, _ = take_turns([1, 2, 3, 4, 5], 1, limit)
    assert len(seen) == 2 * number


def test_few_prompts_warm_a_server_up():
    """With --repeat_prompts, all prompts must be in the prefix cache before the measurement."""
    prompts = [[number] for number in range(16)]
    assert warm_up_prompts(BenchArgs(concurrency=[1]), prompts) == prompts[:1]
    assert warm_up_prompts(BenchArgs(concurrency=[1, 4]), prompts) == prompts[:4]
    assert warm_up_prompts(BenchArgs(concurrency=[16]), prompts) == prompts
    assert warm_up_prompts(BenchArgs(concurrency=[1], repeat_prompts=True), prompts) == prompts


@pytest.mark.parametrize(("seconds", "least", "number"), [(None, 0, 7), (0.0, 0, 0), (0.0, 5, 5), (600.0, 0, 7)])
def test_a_limit_of_time_leaves_out_the_last_prompts(seconds, least, number):
    done = asyncio.run(generate_all(Counting(), [[1]] * 7, 2, "x", (seconds, least)))
    assert len(done.answers) == number
