"""Measure servers at one number of concurrent requests, in several rounds.

The engine's client sends the prompts (`engines/client.py`). Servers that run at the same time answer in turn: with
prompts p1, p2, ... and servers A and B, the order is A p1, B p1, A p2, B p2, ... Other programs that start to use the
machine then slow down both servers, and the ratio of their speeds stays the same.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pkgutil import resolve_name

import aiohttp

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.commands import BenchArgs
from swiftlite.base.log import logger
from swiftlite.engines.client import Answer, Client
from swiftlite.engines.engine import Sampling
from swiftlite.engines.index import ENGINES
from swiftlite.serve.bench.results import ConcurrencyResult, Round
from swiftlite.serve.bench.servers import RunningServer
from swiftlite.serve.prompt_groups import Groups, add_to

WARM_UP = "warm-up"
BLOCK_PER_REQUEST = 4
"""Number of prompts per concurrent request that a server answers before the next server's turn. At the end of each
turn, fewer requests are in flight."""


@dataclass(frozen=True)
class Target:
    """A server to measure.

    Attributes:
        num_speculative_tokens: number of draft tokens per step; 0 for a server without drafts.
        salt: text that separates the prefix cache of this measurement from that of others with the same server.
    """

    num_speculative_tokens: int
    running: RunningServer
    salt: str = ""


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
    measured: list[ConcurrencyResult] = field(default_factory=list)

    @classmethod
    def of(cls, target: Target) -> "ServerResult":
        """Return the result of a server before its first measurement."""
        return cls(target.num_speculative_tokens, target.running.command, target.running.seconds_to_start)

    def draft_groups(self, names: Sequence[str]) -> Groups:
        """Return the draft counts of all answers by the name of their prompt's group; empty if the server does not
        count them.
        """
        groups: Groups = {}
        for result in self.measured:
            for each in result.rounds:
                for name, answer in zip(names, each.answers, strict=False):  # --max_seconds sends fewer prompts
                    if answer.counts is not None:
                        add_to(groups, name, 1, answer.counts)
        return groups


@dataclass
class Measurement:
    """The measurement of one server in progress, at one concurrency.

    Attributes:
        rounds: the rounds so far.
        cached_tokens: number of prompt tokens in these rounds that were found in the prefix cache.
    """

    target: Target
    client: Client
    rounds: list[Round] = field(default_factory=list)
    cached_tokens: int = 0

    async def send(
        self, prompts: Sequence[Sequence[int]], concurrency: int, salt: str, limit: tuple[float | None, int] = (None, 0)
    ) -> Round:
        """Send every prompt once. For the arguments, see `generate_all`."""
        with self._explained():
            cached_before = await self.client.cached_tokens()
            done = await generate_all(self.client, prompts, concurrency, salt, limit)
            self.cached_tokens += await self.client.cached_tokens() - cached_before
        return done

    async def draft_counts(self) -> DraftCounts:
        """Return the draft counts since the start of the server."""
        with self._explained():
            return await self.client.draft_counts()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert errors of the connection to a UserError with the end of the server's log."""
        try:
            yield
        except aiohttp.ClientError as error:
            raise self.target.running.server.failure(f"the server stopped responding: {error}") from None


async def measure(
    args: BenchArgs,
    targets: Sequence[Target],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seconds: float | None,
    after_concurrency: Callable[[list[ConcurrencyResult]], None],
) -> None:
    """Send every prompt to each server `args.rounds` times at every concurrency.

    Args:
        targets: running servers, which answer in turn.
        seconds: time after which the first server's first round starts no further prompt. The other rounds and servers
            get as many prompts.
        after_concurrency: called with the result of each server after each concurrency.

    Raises:
        UserError: a server rejected a prompt or stopped responding.
    """
    async with AsyncExitStack() as stack:
        clients = []
        for target in targets:
            url, k = target.running.server.url, target.num_speculative_tokens
            clients.append(await stack.enter_async_context(connect(args.infer_backend, url, sampling, k)))
        await _warm_up(args, [Measurement(*pair) for pair in zip(targets, clients, strict=True)], prompts)
        for concurrency in args.concurrency:
            measurements = [Measurement(*pair) for pair in zip(targets, clients, strict=True)]
            results = await _measure_one(args, measurements, concurrency, prompts, seconds)
            prompts, seconds = prompts[: len(results[0].rounds[0].answers)], None
            after_concurrency(results)


async def _warm_up(args: BenchArgs, measurements: Sequence[Measurement], prompts: Sequence[Sequence[int]]) -> None:
    """Send the first prompts to each server. With --repeat_prompts, llama.cpp's client must know them all as sent."""
    warm: list[RunningServer] = []
    for each in measurements:
        if args.repeat_prompts or each.target.running not in warm:
            warm.append(each.target.running)
            await each.send(warm_up_prompts(args, prompts), max(args.concurrency), WARM_UP)


async def _measure_one(
    args: BenchArgs,
    measurements: Sequence[Measurement],
    concurrency: int,
    prompts: Sequence[Sequence[int]],
    seconds: float | None,
) -> list[ConcurrencyResult]:
    """Measure the servers at one concurrency."""
    counts_before = [await each.draft_counts() for each in measurements]
    for number in range(args.rounds):
        # Prompts share cached prefixes only within a round, so each round computes them again.
        salt = f"{concurrency} {number}"
        if args.repeat_prompts:
            salt = WARM_UP
        num_answers = await run_round(measurements, prompts, concurrency, salt, (seconds, max(args.concurrency)))
        prompts, seconds = prompts[:num_answers], None
    asked = args.rounds * sum(map(len, prompts))
    results = []
    for each, before in zip(measurements, counts_before, strict=True):
        counts = None
        k = each.target.num_speculative_tokens
        if k:
            counts = (await each.draft_counts()).since(before)
        result = ConcurrencyResult(concurrency, each.rounds, counts, each.cached_tokens / asked)
        results.append(result)
        speeds = ", ".join(f"{speed:.1f}" for speed in result.speeds)
        logger.info("%s, concurrency %d: %s tokens/s", describe(k), concurrency, speeds)
    return results


async def run_round(
    measurements: Sequence[Measurement],
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    salt: str,
    limit: tuple[float | None, int],
) -> int:
    """Send every prompt to each server once, block by block; return the number of prompts that were sent to each.

    Args:
        limit: seconds after which the first server gets no further prompt, and a number of prompts that are sent in
            any case.
    """
    first = measurements[0]
    for measurement in measurements:
        measurement.rounds.append(Round([], 0.0))
    size = block_size(concurrency, len(measurements)) or len(prompts)
    seconds, least = limit
    for start in range(0, len(prompts), size):
        left = None
        if seconds is not None:
            left = seconds - first.rounds[-1].seconds
            if left <= 0 and start >= least:
                break
        block = prompts[start : start + size]
        for measurement in measurements:
            limit = (None, 0)
            if measurement is first:
                limit = (left, least - start)
            # With --repeat_prompts, all measurements of a server share the cache.
            own_salt = salt if salt == WARM_UP else measurement.target.salt + salt
            done = await measurement.send(block, concurrency, own_salt, limit)
            measurement.rounds[-1] += done
            block = block[: len(done.answers)]
    return len(first.rounds[-1].answers)


def block_size(concurrency: int, num_servers: int) -> int | None:
    """Return the number of prompts that a server answers before the next server's turn; None for all prompts."""
    if num_servers == 1:
        return None
    if concurrency == 1:
        return 1
    return BLOCK_PER_REQUEST * concurrency


def warm_up_prompts(args: BenchArgs, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """Return the prompts that are sent before the measurement, because the first requests compile kernels and allocate
    memory.

    With --repeat_prompts these are all prompts, so that the measured requests find their prefixes in the cache.
    """
    if args.repeat_prompts:
        return prompts
    return prompts[: max(args.concurrency)]


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
