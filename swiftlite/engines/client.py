"""Define the clients of engines' servers, and read the stream of an answer.

Each engine has its client class (`vllm/client.py`, `sglang/client.py`). Received bytes are stored with their arrival
times. They are parsed after the answer is complete, so that the time of parsing is not measured.

vLLM's own client (`vllm bench serve`) is not used, because it requires vLLM and does not count SGLang's drafts.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.errors import UserError
from swiftlite.engines.engine import Sampling
from swiftlite.engines.info import EngineInfo
from swiftlite.engines.server import metrics

Event = tuple[float, dict[str, Any]]
"""A chunk of a streamed answer: seconds since the request was sent, and the parsed content."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    Attributes:
        num_tokens: number of generated tokens, as counted by the engine.
        seconds_to_first: seconds from sending the request to the first chunk of the answer.
        seconds: seconds from sending the request to the last chunk.
        counts: draft counts of this answer; None if the engine does not count drafts per request.
        cached_tokens: number of prompt tokens found in the prefix cache; 0 if the engine does not report it per
            request.
    """

    text: str
    num_tokens: int
    seconds_to_first: float
    seconds: float
    counts: DraftCounts | None = None
    cached_tokens: int = 0

    @property
    def seconds_per_token(self) -> float | None:
        """Mean seconds per token after the first chunk; None if there are no further tokens."""
        if self.num_tokens <= 1:
            return None
        return (self.seconds - self.seconds_to_first) / (self.num_tokens - 1)


class Client(ABC):
    """A client of one engine's server.

    Args:
        sampling: sampling settings of all answers.
        num_speculative_tokens: number of tokens drafted per step.
    """

    info: EngineInfo

    def __init__(self, session: aiohttp.ClientSession, sampling: Sampling, num_speculative_tokens: int):
        self._session = session
        self._sampling = sampling
        self._num_tokens = num_speculative_tokens
        self._cached_tokens = 0

    @abstractmethod
    async def answer(self, prompt: Sequence[int], salt: str) -> Answer:
        """Complete a prompt; the prefix cache is shared only between prompts with the same salt.

        Raises:
            UserError: the server rejects the request.
            aiohttp.ClientError: the server does not respond.
        """

    async def draft_counts(self) -> DraftCounts:
        """Return the draft counts since the start of the server."""
        return metrics.counts_of(await self._metrics(), self.info.metrics_prefix, self._num_tokens)

    async def cached_tokens(self) -> int:
        """Return the number of prompt tokens found in the prefix cache since the start of the server."""
        return self._cached_tokens

    async def _metrics(self) -> str:
        async with self._session.get("/metrics", raise_for_status=True) as response:
            return await response.text()


async def stream(session: aiohttp.ClientSession, path: str, request: dict[str, Any]) -> list[Event]:
    """Send a request and return the server-sent events of its answer.

    Raises:
        UserError: the server rejects the request, immediately or in the middle of the answer.
    """
    lines: list[tuple[float, bytes]] = []
    start = time.perf_counter()
    async with session.post(path, json=request) as response:
        if response.status != 200:
            raise _refusal(await response.text())
        async for line in response.content:
            lines.append((time.perf_counter() - start, line))
    events: list[Event] = []
    # Parsing between two chunks would delay the times of later ones.
    for seconds, line in lines:
        text = line.removeprefix(b"data: ")
        # Other lines are empty: they separate events.
        if text != line and text.strip() != b"[DONE]":
            events.append((seconds, json.loads(text)))
    for _, event in events:
        if "error" in event:
            raise _refusal(json.dumps(event["error"]))
    return events


def _refusal(text: str) -> UserError:
    return UserError(
        f"the server rejected a prompt: {text.strip()[:500]}", "bench.json contains the previous measurements"
    )
