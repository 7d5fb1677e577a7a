"""Serve the transformers engine: completions and chats in OpenAI's format, one request at a time.

    python -m swiftlite.engines.transformers.serve MODEL --port 8000 ...

`server.py` builds this command. Answers are not streamed. A stop text ends an answer after its generation.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from swiftlite.base.errors import UserError
from swiftlite.data.template import ChatTemplate, load_tokenizer, stop_token_ids
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.ngram import ngrams_of
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.server.metrics import Throughput
from swiftlite.engines.transformers.engine import TransformersEngine
from swiftlite.engines.transformers.requests import ChatRequest, CompletionRequest, Request, describe
from swiftlite.engines.transformers.server import metrics_text
from swiftlite.families.resolved import HfModel

Handler = Callable[[web.Request], Awaitable[web.Response]]
AnyRequest = TypeVar("AnyRequest", bound=Request)
MAX_TOKENS = 16
"""Default of OpenAI's completions."""
MAX_BYTES = 16_000_000
"""Maximum size of a request."""


class Service:
    """The routes of the server."""

    def __init__(self, engine: TransformersEngine, template: ChatTemplate, name: str, model: HfModel):
        self._engine = engine
        self._template = template
        self._name = name
        self._stops = stop_token_ids(template, model.directory)
        self._vocab_size = model.config["vocab_size"]
        self._throughput = Throughput(0, 0.0)
        self._turn = asyncio.Lock()

    def app(self) -> web.Application:
        """Return the application with all routes."""
        app = web.Application(client_max_size=MAX_BYTES)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", _checked(CompletionRequest, self.completions))
        app.router.add_post("/v1/chat/completions", _checked(ChatRequest, self.chat))
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        counts = self._engine.draft_counts() if self._engine.num_speculative_tokens else None
        return web.Response(text=metrics_text(counts, self._throughput))

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def completions(self, request: CompletionRequest) -> dict[str, Any]:
        """Complete prompts; with `echo` and `logprobs`, also return the log-probabilities of the prompts."""
        choices = []
        for index, prompt in enumerate(request.prompts):
            ids = self._template.tokenize(prompt) if isinstance(prompt, str) else prompt
            choice = await self._complete(ids, request, MAX_TOKENS)
            prefix: list[int] = ids if request.echo else []
            text = self._template.decode(prefix) + choice["text"]
            log_p = None
            if request.logprobs is not None:
                log_p = await self._log_probabilities(ids, choice, is_echo=bool(request.echo))
            choices.append(
                {"index": index, "text": text, "logprobs": log_p, "finish_reason": choice["finish_reason"]}
                | {"usage": choice["usage"]}
            )
        return self._answer("text_completion", choices)

    async def chat(self, request: ChatRequest) -> dict[str, Any]:
        """Answer the last turn of a conversation."""
        ids = self._template.encode_prompt(request.messages, request.tools)
        choice = await self._complete(ids, request, self._engine.max_length)
        message = {"role": "assistant", "content": choice["text"]}
        choices = [{"index": 0, "message": message, "finish_reason": choice["finish_reason"], "usage": choice["usage"]}]
        return self._answer("chat.completion", choices)

    async def _complete(self, ids: list[int], request: Request, max_tokens: int) -> dict[str, Any]:
        # An id outside of the embedding would end the process on a GPU, not only the request.
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"token {token} has no embedding")
        if request.model not in (None, self._name):
            raise ValueError(f"model {request.model!r} is not served; this server has {self._name!r}")
        begin = time.perf_counter()
        sampling = request.sampling(max_tokens, self._stops)
        (completion,) = await self._in_turn(self._engine.generate, [ids], sampling)
        seconds = time.perf_counter() - begin
        self._throughput = Throughput(
            self._throughput.tokens + len(completion.token_ids), self._throughput.seconds + seconds
        )
        generated: Any = self._template.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        text = generated
        for stop in request.stops:
            text = text.partition(stop)[0]
        reason = "stop" if text != generated else completion.finish_reason
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(completion.token_ids)}
        return {
            "text": text,
            "finish_reason": reason,
            "usage": usage,
            "ids": completion.token_ids,
            "log_p": completion.log_p,
        }

    async def _in_turn(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a function of the engine, which computes one at a time."""
        # One request at a time: hooks of the engine would collect the states of all of them (engine.py: _states).
        async with self._turn:
            # In a thread, so that the server answers /health and /metrics while it generates.
            work = asyncio.ensure_future(asyncio.to_thread(function, *args))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:  # the client has disconnected
                # A thread cannot be stopped, and the next turn must not begin before it has ended.
                await asyncio.wait([work])
                raise

    async def _log_probabilities(self, ids: list[int], choice: dict[str, Any], *, is_echo: bool) -> dict[str, Any]:
        """Return the log-probabilities of the tokens and, for a prompt, of the most likely tokens at their places."""
        own: list[float | None] = list(choice["log_p"])
        names: list[Any] = list(self._template.tokenizer.convert_ids_to_tokens(choice["ids"]))
        top: list[dict[str, float | None] | None] = [{name: value} for name, value in zip(names, own, strict=True)]
        if is_echo:
            likely, of_likely, of_prompt = await self._in_turn(self._engine.prompt_log_p, ids)
            tokens: list[Any] = list(self._template.tokenizer.convert_ids_to_tokens(ids))
            best: list[Any] = list(self._template.tokenizer.convert_ids_to_tokens(likely))
            at_places = zip(tokens[1:], of_prompt, best, of_likely, strict=True)
            names = tokens + names
            # The first token of a prompt follows nothing, so it has no log-probability.
            own = [None, *of_prompt, *own]
            top = [None, *({token: its, most: largest} for token, its, most, largest in at_places), *top]
        return {"tokens": names, "token_logprobs": own, "top_logprobs": top}

    def _answer(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usages = [choice.pop("usage") for choice in choices]
        usage = {key: sum(each[key] for each in usages) for key in ("prompt_tokens", "completion_tokens")}
        usage["total_tokens"] = sum(usage.values())
        return {"object": kind, "model": self._name, "created": int(time.time()), "choices": choices, "usage": usage}


def _checked(kind: type[AnyRequest], answer: Callable[[AnyRequest], Awaitable[dict[str, Any]]]) -> Handler:
    """Return a handler that responds with status 400 to invalid requests."""

    async def respond(request: web.Request) -> web.Response:
        try:
            content = kind.model_validate(await request.json())
            return web.json_response(await answer(content))
        except ValidationError as error:
            problem = describe(error)
        except (UserError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            problem = str(error) or type(error).__name__
        return web.json_response({"error": {"message": problem, "type": "invalid_request_error"}}, status=400)

    return respond


def main(argv: list[str]) -> None:
    """Load the model and serve it until the process is stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--torch-dtype", default="bfloat16")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--chat-template-kwargs", type=json.loads)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--num-speculative-tokens", type=int, default=0)
    parser.add_argument("--speculative")
    args = parser.parse_args(argv)
    model = resolve_served(args.model)
    template = ChatTemplate(load_tokenizer(model.directory, args.trust_remote_code, args.chat_template_kwargs))
    config = EngineConfig(
        model,
        args.torch_dtype,
        args.trust_remote_code,
        args.num_speculative_tokens,
        args.max_model_len,
        ngrams=ngrams_of(args.speculative),
    )
    service = Service(TransformersEngine(config), template, args.served_model_name, model)
    app = service.app()
    # A request whose client has disconnected ends after the prompt that is being completed.
    web.run_app(app, host=args.host, port=args.port, print=None, handle_signals=True, handler_cancellation=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"swiftlite: {error}")
