"""Measure one server at every concurrency, in several rounds.

The engine's client sends the prompts (`engines/client.py`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pkgutil import resolve_name

import aiohttp

from swiftlite.args.commands import BenchArgs
from swiftlite.base.log import logger
from swiftlite.engines.client import Answer, Client
from swiftlite.engines.engine import Sampling
from swiftlite.engines.index import ENGINES
from swiftlite.serve.bench.results import ConcurrencyResult, Round
from swiftlite.serve.bench.servers import RunningServer

WARM_UP = "warm-up"


@dataclass(frozen=True)
class ServerResult:
    """The measurement of one server.

    Attributes:
        num_speculative_tokens: number of draft tokens per step; 0 for a server without drafts.
        command: command line of the server, with keys replaced by ***.
        seconds_to_start: seconds until the server was healthy.
        measured: one result for each concurrency.
    """

    num_speculative_tokens: int
    command: str
    seconds_to_start: float
    measured: list[ConcurrencyResult]


def measure(
    args: BenchArgs,
    num_speculative_tokens: int,
    running: RunningServer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    salt: str = "",
    seconds: float | None = None,
) -> ServerResult:
    """Send every prompt to a server at every concurrency `args.rounds` times.

    Args:
        seconds: time after which the first round starts no further prompt. The other rounds send as many prompts.
        salt: text that separates the prefix cache of this measurement from that of others with the same server.

    Raises:
        UserError: the server rejected a prompt or stopped responding.
    """
    server = running.server
    try:
        measured = asyncio.run(_ask(args, server.url, num_speculative_tokens, prompts, sampling, salt, seconds))
    except aiohttp.ClientError as error:
        raise server.failure(f"the server stopped responding: {error}") from None
    return ServerResult(num_speculative_tokens, running.command, running.seconds_to_start, measured)


async def _ask(
    args: BenchArgs,
    url: str,
    num_speculative_tokens: int,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    first_salt: str,
    seconds: float | None,
) -> list[ConcurrencyResult]:
    measured = []
    async with connect(args.infer_backend, url, sampling, num_speculative_tokens) as client:
        await generate_all(client, warm_up_prompts(args, prompts), max(args.concurrency), WARM_UP)
        for concurrency in args.concurrency:
            counts_before, cached_before = await client.draft_counts(), await client.cached_tokens()
            rounds: list[Round] = []
            for number in range(args.rounds):
                # Prompts share cached prefixes only within a round, so each round computes them again.
                salt = f"{first_salt}{concurrency} {number}"
                if args.repeat_prompts:
                    salt = WARM_UP
                done = await generate_all(client, prompts, concurrency, salt, (seconds, max(args.concurrency)))
                prompts, seconds = prompts[: len(done.answers)], None
                rounds.append(done)
            counts = None
            if num_speculative_tokens:
                counts = (await client.draft_counts()).since(counts_before)
            cached = await client.cached_tokens() - cached_before
            asked = args.rounds * sum(map(len, prompts))
            result = ConcurrencyResult(concurrency, rounds, counts, cached / asked)
            measured.append(result)
            speeds = ", ".join(f"{speed:.1f}" for speed in result.speeds)
            logger.info("%s, concurrency %d: %s tokens/s", describe(num_speculative_tokens), concurrency, speeds)
    return measured


def warm_up_prompts(args: BenchArgs, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """Return the prompts that are sent before the measurement, because the first requests compile kernels and allocate
    memory.

    With --repeat_prompts these are all prompts, so that the measured requests find their prefixes in the cache.
    """
    if args.repeat_prompts:
        return prompts
    return prompts[: 2 * max(args.concurrency)]


@asynccontextmanager
async def connect(backend: str, url: str, sampling: Sampling, num_speculative_tokens: int) -> AsyncIterator[Client]:
    """Return a client of the engine in --infer_backend.

    Args:
        sampling: sampling settings. The seed is ignored, so that each round samples different answers.
        num_speculative_tokens: number of tokens that the server drafts per step.
    """
    make_client = resolve_name(ENGINES[backend].client)
    # New connections: llama.cpp closes a connection after a streamed answer, although its headers promise to keep it.
    all_at_once = aiohttp.TCPConnector(limit=0, force_close=True)
    patient = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=all_at_once, timeout=patient) as session:
        yield make_client(session, sampling, num_speculative_tokens)


async def generate_all(
    client: Client,
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    salt: str,
    limit: tuple[float | None, int] = (None, 0),
) -> Round:
    """Send every prompt once, with `concurrency` requests in flight.

    The prefix cache is shared only within one `salt`.

    Args:
        limit: seconds after which no further prompt is sent, and a number of prompts that are sent in any case.
    """
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(prompts))
    seconds, least = limit
    start = time.perf_counter()

    async def work() -> None:
        for number, prompt in waiting:
            if seconds is not None and number >= least and time.perf_counter() - start > seconds:
                return
            answers[number] = await client.answer(prompt, salt)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    elapsed = time.perf_counter() - start
    return Round([answers[number] for number in range(len(answers))], elapsed)


def describe(num_speculative_tokens: int) -> str:
    """Return a description of a server for messages and the chart."""
    if not num_speculative_tokens:
        return "without drafts"
    return f"{num_speculative_tokens} draft tokens"
