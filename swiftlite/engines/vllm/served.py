"""Send requests and new weights to a vLLM server that `swiftlite deploy --live_weights` started.

A process other than the server, such as a trainer, uses `ServedVllm`, which has the methods of `VllmEngine`.
"""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit

import aiohttp
import torch

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.serving_fields import WeightTransport
from swiftlite.base.errors import UserError, clip
from swiftlite.engines.engine import Completion, FinishReason, OnAnswer, Sampling, check_prompts, filters_of
from swiftlite.engines.loading.weight_update import Bucket, Part, WeightUpdate, unsupported_layout
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.server.metrics import counts_of
from swiftlite.engines.vllm.info import VLLM
from swiftlite.engines.vllm.live.weight_channel import VllmChannel
from swiftlite.engines.vllm.live.weight_transport import BACKENDS, check_gpus, make_transport
from swiftlite.families.resolved import HfModel

_Result = TypeVar("_Result")
_SHORT = 60
"""Timeout in seconds of a request without computation."""
_QUICK = 10
"""Timeout in seconds of `is_responding`, which is called before every generation for each server that was lost."""
_SHORTEST_WAIT, _LONGEST_WAIT = 0.1, 30.0
"""Bounds of the seconds before a request is sent again that a proxy has not accepted."""
COMPLETIONS = "/v1/completions"
INFO = "/server_info?config_format=json"
_NO_DEFAULTS = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sampling settings that a server otherwise takes from generation_config.json of its model."""


class LostServer(UserError):
    """A server does not respond, or its engine has failed."""


class ServedVllm:
    """The `Engine` that sends requests to a vLLM server; `close` leaves the server running.

    Args:
        url: address of the server, such as http://127.0.0.1:8000.
        api_key: key of the server; default: VLLM_API_KEY of this process.
        timeout: maximum seconds of a request, such as loading a bucket of weights or draining in-flight requests. With
            a batch of prompts, maximum seconds until the next one is finished. The default equals that of
            --distributed_timeout_minutes, the time that other ranks of a trainer wait in a collective.
        model: the model whose weights are sent. Default: the server's model, whose directory must exist on this
            machine.

    Attributes:
        url: address of the server.
        config: vLLM's configuration, as its route /server_info returns it.
        instance_id: a value that changes when the server is restarted.
        weight_transport: value of deploy's --weight_transport.
        max_length: maximum length of prompt and answer in tokens.

    Raises:
        LostServer: no server responds in time.
        UserError: the key is wrong, the server was started without --live_weights, or an update of its weights has
            failed or is running.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600, model: HfModel | None = None):
        self._server = _Server(url, api_key or os.environ.get("VLLM_API_KEY"), timeout)
        self.url = self._server.url
        info = self._server.call("GET", INFO, timeout=_SHORT)
        if not isinstance(info, dict) or "vllm_config" not in info:
            raise _without_option(url)  # another program, or another engine
        self.config = config = info["vllm_config"]
        backend = (config["weight_transfer_config"] or {}).get("backend")
        transports: dict[str, WeightTransport] = {name: transport for transport, name in BACKENDS.items()}
        if backend not in transports:
            raise _without_option(url)
        if self._server.field(self._server.call("GET", "/is_paused"), "is_paused"):
            raise UserError(
                f"the server at {url} is paused: a weight update is in progress or has failed",
                "restart the server unless another process is updating it",
            )
        # A restarted server has the weights of its files again, at the same address.
        self.instance_id: str = config["instance_id"]
        self.weight_transport: WeightTransport = transports[backend]
        if model is None:
            model = resolve_served(config["model_config"]["model"])
        self._vocab_size: int = model.config["vocab_size"]
        drafting = config["speculative_config"] or {}
        self.num_speculative_tokens: int = drafting.get("num_speculative_tokens", 0)
        self.max_length: int = config["model_config"]["max_model_len"]
        check_gpus(self.weight_transport, ())
        client = _ServerClient(self._server)
        host = urlsplit(self._server.url).hostname or "127.0.0.1"
        parallel = config["parallel_config"]
        num_workers = parallel["world_size"] * parallel["data_parallel_size"]
        self._transport = make_transport(self.weight_transport, client, num_workers, host)
        channel = VllmChannel(client, self._transport)
        layout = unsupported_layout(parallel["pipeline_parallel_size"], parallel["enable_expert_parallel"])
        self._weights = WeightUpdate("vLLM", channel, model, drafting.get("method") == "mtp", layout)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: OnAnswer | None = None
    ) -> list[Completion]:
        """Complete every prompt and return completions in order, as `Engine.generate` specifies."""
        self._weights.check_whole()
        check_prompts(prompts, self.max_length)

        async def answer(session: aiohttp.ClientSession, place: int) -> Completion:
            completion = await self.complete(session, prompts[place], sampling, sampling.seed_of(place))
            if on_answer:
                on_answer(place, completion)
            return completion

        async def answer_all(session: aiohttp.ClientSession) -> list[Completion]:
            answers = [asyncio.create_task(answer(session, place)) for place in range(len(prompts))]
            try:
                # A timeout per wait: a batch may take hours, but a server that finishes nothing for so long is lost.
                for next_one in asyncio.as_completed(answers):
                    await self._server.in_time(next_one, COMPLETIONS)
                return [each.result() for each in answers]
            finally:
                # Also closes the connections, whereupon vLLM aborts their requests
                # (entrypoints/serve/utils/api_utils.py: with_cancellation).
                cancel_all(answers)

        return self._server.run(answer_all)

    async def complete(
        self, session: aiohttp.ClientSession, prompt: Sequence[int], sampling: Sampling, seed: int
    ) -> Completion:
        """Complete one prompt.

        Args:
            session: a session of `new_session`.
            seed: seed of this prompt.

        Raises:
            LostServer: the server does not respond, or ends the request before its completion is finished.
            UserError: the server rejects the request.
        """
        request = {
            "prompt": list(prompt),
            # vLLM rejects requests that could exceed its maximum length.
            "max_tokens": min(sampling.max_new_tokens, self.max_length - len(prompt)),
            "temperature": sampling.temperature,
            **filters_of(sampling),
            # Penalties of generation_config.json would change the distribution from which a trainer assumes the tokens.
            **_NO_DEFAULTS,
            "seed": seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,  # only stop_token_ids and texts end an answer
            "stop": list(sampling.stop_strings.strings) if sampling.stop_strings else None,
            "skip_special_tokens": False,  # texts can contain them
            "return_token_ids": True,
            "logprobs": 0 if sampling.log_p else None,  # of the sampled token alone
        }
        try:
            answer = await self._server.ask(session, "POST", COMPLETIONS, request)
        except (aiohttp.ClientError, ValueError) as error:
            raise _no_response(self.url, error) from error
        return self._completion(answer, request["max_tokens"], sampling.log_p)

    def _completion(self, answer: Any, max_tokens: int, log_p: bool) -> Completion:
        """Return the completion of an answer.

        Raises:
            LostServer: the server ended the request early, or the answer is not one of vLLM to such a request.
        """
        try:
            (choice,) = answer["choices"]
            reason, token_ids = choice["finish_reason"], choice["token_ids"]
            numbers = choice["logprobs"]["token_logprobs"] if log_p else None
            is_valid = 0 < len(token_ids) <= max_tokens and all(map(self._is_token, token_ids))
            if numbers is not None:
                # One number that is not finite would make the loss of the whole batch NaN.
                is_valid &= len(numbers) == len(token_ids) and all(map(math.isfinite, numbers))
        except (KeyError, TypeError, ValueError) as error:
            raise self._server.other_answer(answer) from error
        if reason not in get_args(FinishReason):  # "abort": the server is stopping
            raise LostServer(f"the server at {self.url} ended a request early: {reason}", "restart it")
        if not is_valid:
            raise self._server.other_answer(answer)
        return Completion(token_ids, reason, numbers)

    def _is_token(self, token: Any) -> bool:
        return type(token) is int and 0 <= token < self._vocab_size

    def new_session(self) -> aiohttp.ClientSession:
        """Return a session for `complete` and `check`."""
        return self._server.new_session()

    async def check(self, session: aiohttp.ClientSession) -> None:
        """Check that the server responds, that its engine is running, and that it was not restarted since this object
        was made.

        Raises:
            LostServer: one of these is not the case.
        """
        await self._server.get(session, "/health")
        config = self._server.field(await self._server.get(session, INFO), "vllm_config")
        if self._server.field(config, "instance_id") != self.instance_id:
            raise LostServer(f"the server at {self.url} was restarted")

    def is_running(self) -> bool:
        """Return whether `check` raises no error."""
        try:
            self._server.run(self.check)
        except LostServer:
            return False
        return True

    def connect(self) -> None:
        """Connect to the workers of the server, if the transport of weights has connections."""
        self._transport.connect()

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
        self.connect()
        # Paused before the first bucket: no answer is computed with weights of two versions.
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
            # With incomplete weights the server stays paused, because its answers would be wrong without an error.
            if self._weights.is_whole:
                self._resume()

    def weight_version(self) -> str:
        """Return the version of the server's weights: "default" before the first update, then "1", "2", ..."""
        return self._server.field(self._server.call("GET", "/weight_info"), "weight_version")

    def draft_counts(self) -> DraftCounts:
        """Return the draft counts since the start of the server, including the requests of other clients."""
        text = self._server.call("GET", "/metrics")
        try:
            return counts_of(text, VLLM.metrics_prefix, self.num_speculative_tokens)
        except (TypeError, ValueError) as error:
            raise self._server.other_answer(text) from error

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
        return self._server.field(self._server.call("POST", "/reset_prefix_cache"), "success")


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

    async def get(self, session: aiohttp.ClientSession, path: str) -> Any:
        """Return the response of a route that responds immediately. Errors are those of `ask` and `in_time`."""
        try:
            return await self.in_time(self.ask(session, "GET", path), path, _SHORT)
        except (aiohttp.ClientError, ValueError) as error:
            raise _no_response(self.url, error) from error

    def new_session(self) -> aiohttp.ClientSession:
        """Return a session without a time limit; `in_time` limits the time of an answer."""
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        # A connection is not used again, because vLLM closes it after some seconds, possibly during the next request.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        return aiohttp.ClientSession(headers=self._headers, timeout=limit, connector=connector)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Send a request and return its response. Errors are those of `ask` and `in_time`.

        Args:
            timeout: maximum seconds, if shorter than the default.
        """
        return self.run(lambda session: self.in_time(self.ask(session, method, path, body), path, timeout))

    def run(self, use: Callable[[aiohttp.ClientSession], Awaitable[_Result]]) -> _Result:
        """Run a function with a session.

        Raises:
            LostServer: the server does not respond, or an answer is truncated.
        """

        async def connected() -> _Result:
            async with self.new_session() as session:
                return await use(session)

        try:
            return asyncio.run(connected())
        except (aiohttp.ClientError, ValueError) as error:
            raise _no_response(self.url, error) from error

    async def in_time(self, answer: Awaitable[_Result], path: str, timeout: float | None = None) -> _Result:
        """Await an answer.

        Raises:
            LostServer: the timeout expires.
        """
        seconds = min(timeout or self._timeout, self._timeout)
        try:
            return await asyncio.wait_for(answer, seconds)
        except aiohttp.ClientError:  # connection timeouts are also TimeoutErrors
            raise
        except TimeoutError as error:
            raise LostServer(
                f"the server at {self.url} did not answer {path} within {seconds:g} s",
                "see its log; restart it if it hangs, or increase ServedVllm(timeout=...) if it is slow",
            ) from error

    async def ask(
        self, session: aiohttp.ClientSession, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Any:
        """Return the server's response, parsed if it is JSON. While a proxy in front of the server limits the rate of
        requests (status 429), the request is sent again.

        Raises:
            LostServer: the server reports an internal error, such as a dead engine, or the proxy does not accept the
                request within the client's timeout.
            UserError: the server rejects the request.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            async with session.request(method, self.url + path, json=body) as response:
                if response.status != 429 or time.monotonic() > deadline:
                    return await self._content(response, path)
                seconds = _retry_after(response.headers)
            await asyncio.sleep(seconds)

    async def _content(self, response: aiohttp.ClientResponse, path: str) -> Any:
        if response.status == 401:
            raise UserError(
                f"the server at {self.url} rejected the API key",
                "set VLLM_API_KEY to the api_key of the server",
            )
        # Routes for weights exist only with the option; those under /v1 exist in every server.
        if response.status == 404 and not path.startswith("/v1"):
            raise _without_option(self.url)
        if response.status != 200:
            text = (await response.text()).strip()[:2000]
            # Others get the prompts of a failed server; a request that is rejected would be rejected by all.
            refusal = LostServer if response.status == 429 or response.status >= 500 else UserError
            raise refusal(f"the server at {self.url} rejected {path}: {text}", "see its log for the cause")
        if response.content_type == "application/json":
            return await response.json()
        return await response.text()

    def field(self, answer: Any, name: str) -> Any:
        """Return a field of a JSON object.

        Raises:
            LostServer: the answer is something else, such as the page of another program at this address.
        """
        if not isinstance(answer, dict) or name not in answer:
            raise self.other_answer(answer)
        return answer[name]

    def other_answer(self, answer: Any) -> LostServer:
        """Return the error of an answer that vLLM does not give."""
        return LostServer(
            f"the server at {self.url} gave an invalid answer: {clip(repr(answer), 200)}",
            "check that vLLM runs at this address, and restart it",
        )


def is_responding(url: str) -> bool:
    """Return whether a program responds at the address of a server."""
    try:
        _Server(url, None, timeout=_QUICK).call("GET", "/health")
    except LostServer:
        return False
    except UserError:
        return True  # it rejects the request
    return True


def cancel_all(tasks: Iterable[asyncio.Task]) -> None:
    """Cancel tasks. The errors of those that have failed are read; otherwise asyncio logs them."""
    for task in tasks:
        if not task.cancel() and not task.cancelled():
            task.exception()


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds to wait before a request is sent again; 1 if the header is missing or has a date."""
    text = headers.get("Retry-After", "")
    if not text.isdecimal():
        return 1.0
    return min(max(float(text), _SHORTEST_WAIT), _LONGEST_WAIT)


def _no_response(url: str, error: Exception) -> LostServer:
    """Return the error of a server that cannot be reached, or that closed a connection."""
    return LostServer(
        f"the server at {url} does not respond: {str(error) or type(error).__name__}",
        "start it with swiftlite deploy --live_weights; its address is http://HOST:PORT",
    )


def _without_option(url: str) -> UserError:
    return UserError(
        f"the server at {url} does not support new weights",
        "start it with swiftlite deploy --infer_backend vllm --live_weights",
    )
