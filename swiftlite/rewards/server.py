"""Score completions with a reward model on a server, in the child process of reward functions.

The server has vLLM's route `/classify` for conversations, which vLLM serves for classifiers such as the exports of
`swiftlite megatron rm` (`vllm serve DIR`):

    request     POST /classify  {"messages": [...], "use_activation": false, ...}
    answer      {"data": [{"probs": [SCORE]}]}

Without its activation, the number is the score of transformers' class. The server applies its own chat template.
"""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp

from swiftlite.base.errors import UserError, clip
from swiftlite.rewards.settings import RewardSettings

MAX_IN_FLIGHT = 64
"""Requests that the server has at once."""
MAX_BYTES = 1 << 20
"""Bytes of the longest answer."""
DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0)
DELAYS_AT_START = DELAYS[:3]
"""A child process that replaces another one meets the server as it is then, such as overloaded."""
TRANSIENT = (429, 500, 502, 503, 504)
START = "start it: vllm serve REWARD_MODEL --port 8001, and give http://HOST:8001"


class ServerError(Exception):
    """The server does not answer, or its answer is not a score."""


class RewardServer:
    """A reward model on a server.

    Args:
        url: address of the server. Its key is VLLM_API_KEY of this process.
        delays: seconds before each repetition of a request that has met no server, or one that is overloaded.
    """

    def __init__(self, url: str, delays: Sequence[float] = DELAYS):
        self.url = url.rstrip("/")
        self._delays = delays
        key = os.environ.get("VLLM_API_KEY")
        self._headers = {"Accept-Encoding": "identity"}  # otherwise a small answer can have any length
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    async def identity(self) -> str:
        """Return name and path of the served model.

        Raises:
            ServerError: the server does not answer, or serves no model.
        """
        async with self._session() as session:
            answer = await self._request(session, "GET", "/v1/models")
        try:
            (card, *_) = answer["data"]
            return f"{card['id']} from {card.get('root')}"
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ServerError(f"{self.url}/v1/models names no model") from None

    async def score(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:
        """Return the score of each conversation.

        Raises:
            ServerError: the server does not answer, refuses a conversation, or returns something else than one score.
        """
        free = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def of(session: aiohttp.ClientSession, turns: list[Any]) -> float:
            # vLLM's defaults, stated so that another server does the same
            content = {"messages": turns, "use_activation": False}
            content |= {"add_generation_prompt": False, "add_special_tokens": False}
            async with free:
                return self._score_in(await self._request(session, "POST", "/classify", content))

        tasks = []
        try:
            async with self._session() as session, asyncio.TaskGroup() as group:
                for prompt, completion in zip(prompts, completions, strict=True):
                    turns = [*prompt, {"role": "assistant", "content": str(completion)}]
                    tasks.append(group.create_task(of(session, turns)))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _score_in(self, answer: Any) -> float:
        try:
            ((score, *others),) = [each["probs"] for each in answer["data"]]
        except (KeyError, TypeError, ValueError):
            raise ServerError(f"{self.url}/classify returned {_shown(answer)}") from None
        if others or isinstance(score, bool) or not isinstance(score, int | float):
            given = _shown([score, *others])
            raise ServerError(f"{self.url}/classify returned {given} for a conversation; a reward model has one label")
        try:
            return float(score)
        except OverflowError:
            raise ServerError(f"{self.url}/classify returned a number of {len(str(abs(score)))} digits") from None

    def _session(self) -> aiohttp.ClientSession:
        # Without a time limit: a call is limited as a whole (--reward_timeout), and a repeated request is slower still.
        return aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None))

    async def _request(self, session: aiohttp.ClientSession, verb: str, path: str, content: Any = None) -> Any:
        """Return the JSON of an answer; repeat the request if the server is not there or overloaded."""
        for delay in (*self._delays, None):
            try:
                async with session.request(verb, self.url + path, json=content, allow_redirects=False) as response:
                    status, body = response.status, bytearray()
                    async for part in response.content.iter_chunked(1 << 16):
                        body += part
                        if len(body) > MAX_BYTES:
                            raise ServerError(f"{self.url}{path} returned more than {MAX_BYTES} bytes")
                problem = f"{status}: {clip(body.decode(errors='replace'), 200)}"
            except (aiohttp.ClientError, OSError) as error:
                status, body, problem = None, bytearray(), f"{type(error).__name__}: {error}"
            if status == 200:
                break
            if delay is None or status not in (None, *TRANSIENT):
                raise ServerError(f"{self.url}{path} returned {problem}" if status else f"{self.url}: {problem}")
            await asyncio.sleep(delay)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise ServerError(
                f"{self.url}{path} returned no JSON: {clip(body.decode(errors='replace'), 100)}"
            ) from None


def _shown(answer: Any) -> str:
    """Return the start of an answer for an error."""
    try:
        return clip(json.dumps(answer), 100)
    except RecursionError:
        return "deeply nested JSON"


def open_server(settings: RewardSettings, url: str) -> tuple[Callable[..., Coroutine[Any, Any, list[float]]], str]:
    """Return a reward function that asks a server, and the identity of the model there.

    Raises:
        UserError: the server does not answer, or does not serve a reward model.
    """

    async def identify() -> str:
        server = RewardServer(url, DELAYS_AT_START)
        async with asyncio.timeout(settings.timeout):
            name = await server.identity()
            await server.score([[{"role": "user", "content": "Hi"}]], ["Hello"])
            return name

    try:
        identity = asyncio.run(identify())
    except (ServerError, TimeoutError) as error:
        reason = str(error) or f"it did not answer within {settings.timeout:g} seconds (--reward_timeout)"
        raise UserError(f"--reward_server {url} cannot be used: {reason}", START, exit_code=2) from None
    return RewardServer(url).score, identity
