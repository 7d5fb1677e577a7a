"""Send requests and new weights to a vLLM server that `swiftlite deploy --live_weights` started.

A process other than the server, such as a trainer, uses `ServedVllm`, which has the methods of `VllmEngine`.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import torch

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.fields import WeightTransport
from swiftlite.engines.engine import Completion, OnAnswer, Sampling, check_prompts, finish_reason
from swiftlite.engines.loading.weight_update import Bucket, Part, WeightUpdate, unsupported_layout
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.vllm.live.weight_channel import VllmChannel
from swiftlite.engines.vllm.live.weight_transport import BACKENDS, check_gpus, make_transport
from swiftlite.engines.vllm.metrics import read_metrics
from swiftlite.errors import UserError

_Result = TypeVar("_Result")
_SHORT = 60
"""Timeout in seconds of a request without computation."""


class ServedVllm:
    """The `Engine` that sends requests to a vLLM server; `close` leaves the server running.

    Args:
        url: address of the server, such as http://127.0.0.1:8000.
        api_key: key of the server; default: VLLM_API_KEY of this process.
        timeout: maximum seconds of a request, such as loading a bucket of weights or draining in-flight requests. With
            a batch of prompts, maximum seconds until the next one is finished. The default equals that of
            --distributed_timeout_minutes, the time that other ranks of a trainer wait in a collective.

    Raises:
        UserError: no server responds in time; the key is wrong, the server was started without --live_weights, or
            an update of its weights has failed or is running.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600):
        self._server = _Server(url, api_key or os.environ.get("VLLM_API_KEY"), timeout)
        config = self._server.call("GET", "/server_info?config_format=json")["vllm_config"]
        backend = (config["weight_transfer_config"] or {}).get("backend")
        transports: dict[str, WeightTransport] = {name: transport for transport, name in BACKENDS.items()}
        if backend not in transports:
            raise _without_option(url)
        if self._server.call("GET", "/is_paused")["is_paused"]:
            raise UserError(
                f"the server at {url} is paused: a weight update is in progress or has failed",
                "restart the server unless another process is updating it",
            )
        model = resolve_served(config["model_config"]["model"])
        drafting = config["speculative_config"] or {}
        self.num_speculative_tokens: int = drafting.get("num_speculative_tokens", 0)
        self._max_length: int = config["model_config"]["max_model_len"]
        check_gpus(transports[backend], ())
        client = _ServerClient(self._server)
        host = urlsplit(self._server.url).hostname or "127.0.0.1"
        parallel = config["parallel_config"]
        num_workers = parallel["world_size"] * parallel["data_parallel_size"]
        self._transport = make_transport(transports[backend], client, num_workers, host)
        channel = VllmChannel(client, self._transport)
        layout = unsupported_layout(parallel["pipeline_parallel_size"], parallel["enable_expert_parallel"])
        self._weights = WeightUpdate("vLLM", channel, model, drafting.get("method") == "mtp", layout)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: OnAnswer | None = None
    ) -> list[Completion]:
        """Complete every prompt and return completions in order, as `Engine.generate` specifies."""
        self._weights.check_whole()
        check_prompts(prompts, self._max_length)

        async def answer(session: aiohttp.ClientSession, place: int) -> Completion:
            request = {
                "prompt": list(prompts[place]),
                # vLLM rejects requests that could exceed its maximum length.
                "max_tokens": min(sampling.max_new_tokens, self._max_length - len(prompts[place])),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "seed": sampling.seed_of(place),
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": True,  # only stop_token_ids end an answer
                "return_token_ids": True,
            }
            (choice,) = (await self._server.ask(session, "POST", "/v1/completions", request))["choices"]
            completion = Completion(choice["token_ids"], finish_reason(choice["finish_reason"]))
            if on_answer:
                on_answer(place, completion)
            return completion

        async def answer_all(session: aiohttp.ClientSession) -> list[Completion]:
            answers = [asyncio.create_task(answer(session, place)) for place in range(len(prompts))]
            for next_one in asyncio.as_completed(answers):
                await self._server.in_time(next_one, "/v1/completions")
            return [each.result() for each in answers]

        return self._server.run(answer_all)

    @property
    def bucket_device(self) -> torch.device:
        """Device of the tensors in a bucket of new weights."""
        return self._transport.device

    def update_weights(self, target: Iterable[Bucket] | None = None, draft: Iterable[Bucket] | None = None) -> None:
        """Send all HF tensors of trunk and heads to the server; None keeps the current weights (`WeightUpdate.run`).

        The server finishes in-flight requests with the old weights, and starts new ones after the update. If the update
        fails, the server remains paused for all clients.
        """
        self._weights.check_whole()
        self._weights.check_layout()
        self._transport.connect()
        self._pause()
        try:
            self._weights.run(target, draft)
            self._server.call("POST", "/update_weight_version", {"new_version": self._next_version()})
        except UserError as error:
            if not self._weights.is_whole:
                raise UserError(
                    f"{error.problem}\nthe server at {self._server.url} has only part of the new weights and stays "
                    "paused, or has stopped",
                    error.hint or "restart the server",
                ) from error
            raise
        finally:
            if self._weights.is_whole:
                self._resume()

    def weight_version(self) -> str:
        """Return the version of the server's weights: "default" before the first update, then "1", "2", ..."""
        return self._server.call("GET", "/weight_info")["weight_version"]

    def draft_counts(self) -> DraftCounts:
        """Return the draft counts since the start of the server, including the requests of other clients."""
        return read_metrics(self._server.call("GET", "/metrics"), self.num_speculative_tokens)

    def close(self) -> None:
        """Disconnect from the server, which keeps running."""
        self._transport.close()

    def _pause(self) -> None:
        try:
            self._server.call("POST", "/pause?mode=wait")
        except UserError as error:
            self._resume()  # the server may still be paused for all clients
            problem = f"{error.problem}\nthe server at {self._server.url} keeps its current weights"
            raise UserError(problem, error.hint) from error

    def _resume(self) -> None:
        try:
            self._server.call("POST", "/resume", timeout=_SHORT)
        except UserError as error:
            problem = (
                f"{error.problem}\nthe server at {self._server.url} has complete weights, but is paused or stopped"
            )
            raise UserError(problem, error.hint) from error

    def _next_version(self) -> str:
        version = self.weight_version()
        if not version.isdigit():  # "default"
            return "1"
        return str(int(version) + 1)


class _ServerClient:
    """The `TransferClient` that calls the HTTP routes of a vLLM server."""

    part: Part = "target"

    def __init__(self, server: "_Server"):
        self._server = server

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._server.call("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        route = "/start_weight_update"
        if self.part == "draft":
            route = "/start_draft_weight_update"
        self._server.call("POST", route)

    def update_weights(self, update_info: Any) -> None:
        self._server.call("POST", "/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._server.call("POST", "/finish_weight_update", {"weight_version": weight_version})

    def reset_prefix_cache(self) -> bool:
        return self._server.call("POST", "/reset_prefix_cache")["success"]


class _Server:
    """Requests to one server, with errors that a user can understand.

    Args:
        timeout: maximum seconds of a request.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float):
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._headers: dict[str, str] = {}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Send a request and return its response. Errors are those of `ask` and `in_time`.

        Args:
            timeout: maximum seconds, if shorter than the default.
        """
        return self.run(lambda session: self.in_time(self.ask(session, method, path, body), path, timeout))

    def run(self, use: Callable[[aiohttp.ClientSession], Awaitable[_Result]]) -> _Result:
        """Run a function with a session.

        Raises:
            UserError: the server does not respond, or an answer is truncated.
        """

        async def connected() -> _Result:
            # `in_time` limits the time of an answer.
            limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(headers=self._headers, timeout=limit, connector=connector) as session:
                return await use(session)

        try:
            return asyncio.run(connected())
        except (aiohttp.ClientError, ValueError) as error:
            raise UserError(
                f"the server at {self.url} does not respond: {str(error) or type(error).__name__}",
                "start it with swiftlite deploy --live_weights; its address is http://HOST:PORT",
            ) from error

    async def in_time(self, answer: Awaitable[_Result], path: str, timeout: float | None = None) -> _Result:
        """Await an answer.

        Raises:
            UserError: the timeout expires.
        """
        seconds = min(timeout or self._timeout, self._timeout)
        try:
            return await asyncio.wait_for(answer, seconds)
        except aiohttp.ClientError:  # connection timeouts are also TimeoutErrors
            raise
        except TimeoutError as error:
            raise UserError(
                f"the server at {self.url} did not answer {path} within {seconds:g} s",
                "see its log; restart it if it hangs, or increase ServedVllm(timeout=...) if it is slow",
            ) from error

    async def ask(self, session: aiohttp.ClientSession, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """Return the server's response, parsed if it is JSON.

        Raises:
            UserError: the server rejects the request.
        """
        async with session.request(method, self.url + path, json=body) as response:
            if response.status == 401:
                raise UserError(
                    f"the server at {self.url} rejected the API key",
                    "set VLLM_API_KEY to the api_key of the server",
                )
            if response.status == 404 and not path.startswith("/v1"):
                raise _without_option(self.url)
            if response.status != 200:
                text = (await response.text()).strip()[:2000]
                raise UserError(f"the server at {self.url} rejected {path}: {text}", "see its log for the cause")
            if response.content_type == "application/json":
                return await response.json()
            return await response.text()


def _without_option(url: str) -> UserError:
    return UserError(
        f"the server at {url} does not support new weights",
        "start it with swiftlite deploy --infer_backend vllm --live_weights",
    )
