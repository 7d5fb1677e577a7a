"""Asking a server: prompts as token ids, answers as they are streamed, and what the drafts were worth.

One class for each engine, behind `Client`. The bytes of an answer are kept with their times and read when the answer
is whole: a client that parses while it waits would be measured too.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aiohttp

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.bench.figures import Answer, Round
from swiftlite.engines.engine import Sampling
from swiftlite.engines.sglang.engine import draft_counts
from swiftlite.errors import UserError

Event = tuple[float, dict[str, Any]]
"""Seconds since the request was sent, and a piece of the answer."""


class Client(Protocol):
    """Of one engine's server."""

    async def answer(self, prompt: Sequence[int], salt: str) -> Answer:
        """Complete a prompt; what the engine remembers of prompts with another salt is no help to it.

        Raises:
            UserError: the server refuses.
            aiohttp.ClientError: it does not answer.
        """
        ...

    async def draft_counts(self) -> DraftCounts:
        """All that was drafted since the server was started."""
        ...


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
    async with aiohttp.ClientSession(
        url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        yield CLIENTS[backend](session, sampling, num_speculative_tokens)


class VllmClient:
    """The OpenAI route; drafts as /metrics counts them."""

    def __init__(self, session: aiohttp.ClientSession, sampling: Sampling, num_speculative_tokens: int):
        self._session, self._sampling, self._num_tokens = session, sampling, num_speculative_tokens

    async def answer(self, prompt: Sequence[int], salt: str) -> Answer:
        """See `Client`."""
        request = {
            "prompt": list(prompt),
            "max_tokens": self._sampling.max_new_tokens,
            "stop_token_ids": list(self._sampling.stop_token_ids),
            "temperature": 0,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return read_openai(await _stream(self._session, "/v1/completions", request))

    async def draft_counts(self) -> DraftCounts:
        """See `Client`."""
        async with self._session.get("/metrics", raise_for_status=True) as response:
            return read_metrics(await response.text(), self._num_tokens)


def read_openai(events: Sequence[Event]) -> Answer:
    """An answer from the pieces of a stream of completions, the last of which says how many tokens it was."""
    pieces = [(seconds, event["choices"][0]["text"]) for seconds, event in events if event["choices"]]
    return Answer(
        text="".join(text for _, text in pieces),
        num_tokens=events[-1][1]["usage"]["completion_tokens"],
        seconds_to_first=pieces[0][0],
        seconds=pieces[-1][0],
    )


def read_metrics(text: str, num_speculative_tokens: int) -> DraftCounts:
    """vLLM's counters from what its /metrics says, over all its engines."""
    from prometheus_client.parser import text_string_to_metric_families  # vLLM's own requirement

    counted = {"num_drafts": 0, "num_draft_tokens": 0}
    per_position = [0] * num_speculative_tokens
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        name = sample.name.removeprefix("vllm:spec_decode_").removesuffix("_total")
        if name in counted:
            counted[name] += int(sample.value)
        elif name == "num_accepted_tokens_per_pos":
            per_position[int(sample.labels["position"])] += int(sample.value)
    return DraftCounts(counted["num_drafts"], counted["num_draft_tokens"], tuple(per_position))


class SglangClient:
    """SGLang's own route, whose answers come with the counts of their drafts. Measured with 0.5.23."""

    def __init__(self, session: aiohttp.ClientSession, sampling: Sampling, num_speculative_tokens: int):
        self._session, self._sampling, self._num_tokens = session, sampling, num_speculative_tokens
        self._counts = DraftCounts(0, 0, (0,) * num_speculative_tokens)

    async def answer(self, prompt: Sequence[int], salt: str) -> Answer:
        """See `Client`."""
        request = {
            "input_ids": list(prompt),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": self._sampling.max_new_tokens,
                "stop_token_ids": list(self._sampling.stop_token_ids),
            },
            "extra_key": salt,
            "stream": True,
        }
        answer = read_sglang(await _stream(self._session, "/generate", request), self._num_tokens)
        if answer.counts:
            self._counts += answer.counts
        return answer

    async def draft_counts(self) -> DraftCounts:
        """See `Client`."""
        return self._counts


def read_sglang(events: Sequence[Event], num_speculative_tokens: int) -> Answer:
    """An answer from the pieces of SGLang's stream, each of which has all before it."""
    seconds, last = events[-1]
    about = last["meta_info"]
    return Answer(
        text=last["text"],
        num_tokens=about["completion_tokens"],
        seconds_to_first=events[0][0],
        seconds=seconds,
        counts=draft_counts(about, num_speculative_tokens),
    )


CLIENTS = {"vllm": VllmClient, "sglang": SglangClient}


async def _stream(session: aiohttp.ClientSession, path: str, request: dict[str, Any]) -> list[Event]:
    """The server-sent events that answer a request."""
    lines: list[tuple[float, bytes]] = []
    start = time.perf_counter()
    async with session.post(path, json=request) as response:
        if response.status != 200:
            raise _refusal(await response.text())
        async for line in response.content:
            lines.append((time.perf_counter() - start, line))
    data = [(seconds, line.removeprefix(b"data: ")) for seconds, line in lines if line.startswith(b"data: ")]
    events = [(seconds, json.loads(text)) for seconds, text in data if text.strip() != b"[DONE]"]
    for _, event in events:
        if "error" in event:
            raise _refusal(json.dumps(event["error"]))
    return events


def _refusal(text: str) -> UserError:
    return UserError(f"the server refuses a prompt: {text.strip()[:500]}", "bench.json has what was measured before")
