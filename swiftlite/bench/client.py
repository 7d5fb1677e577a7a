"""Sending a server all prompts, N at once; how one prompt is sent is the engine's own (`engines/client.py`)."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp

from swiftlite.bench.figures import Round
from swiftlite.engines.client import Answer, Client
from swiftlite.engines.engine import Sampling
from swiftlite.engines.index import ENGINES
from swiftlite.engines.info import load


async def ask_all(client: Client, prompts: Sequence[Sequence[int]], concurrency: int, salt: str) -> Round:
    """Every prompt once, `concurrency` of them under way until none is left."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(prompts))

    async def work() -> None:
        for number, prompt in waiting:
            answers[number] = await client.answer(prompt, salt)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    seconds = time.perf_counter() - start
    return Round([answers[number] for number in range(len(prompts))], seconds)


@asynccontextmanager
async def connect(backend: str, url: str, sampling: Sampling, num_speculative_tokens: int) -> AsyncIterator[Client]:
    """A client of the engine that --infer_backend names.

    Args:
        sampling: greedy.
        num_speculative_tokens: that the server drafts per step.
    """
    make_client = load(ENGINES[backend].client)
    async with aiohttp.ClientSession(
        url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        yield make_client(session, sampling, num_speculative_tokens)
