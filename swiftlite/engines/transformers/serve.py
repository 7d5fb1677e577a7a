"""Serve the transformers engine: completions and chats in OpenAI's format, one request at a time.

    python -m swiftlite.engines.transformers.serve MODEL --port 8000 ...

`server.py` builds this command. Answers are not streamed. A stop text ends an answer after its generation.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from swiftlite.base.errors import UserError
from swiftlite.data.template import ChatTemplate, load_tokenizer, stop_token_ids
from swiftlite.engines.engine import EngineConfig, Sampling
from swiftlite.engines.ngram import ngrams_of
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.server.metrics import Throughput
from swiftlite.engines.transformers.engine import TransformersEngine
from swiftlite.engines.transformers.server import metrics_text
from swiftlite.families.resolved import HfModel

MAX_TOKENS = 16
"""Default of OpenAI's completions."""
GREEDY = 1e-5
"""Smaller temperatures are 0, as in vLLM: logits divided by them would be infinite."""
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_BYTES = 16_000_000
"""Maximum size of a request."""
READ = {
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "seed", "stop", "n", "echo", "logprobs", "tools", "chat_template_kwargs"),
}
"""Fields of requests that the server reads."""
WITHOUT_EFFECT = {
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
}
"""Fields that do not change an answer."""
DEFAULTS = {"add_generation_prompt": True, "best_of": 1, "response_format": {"type": "text"}, "tool_choice": "auto"}
"""Values of other fields that request what the server does anyway, as empty values and 0 do. Other fields are refused,
because the server would ignore them."""


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
        app.router.add_post("/v1/completions", _checked(self.completions))
        app.router.add_post("/v1/chat/completions", _checked(self.chat))
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        counts = self._engine.draft_counts() if self._engine.num_speculative_tokens else None
        return web.Response(text=metrics_text(counts, self._throughput))

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def completions(self, content: dict[str, Any]) -> dict[str, Any]:
        """Complete prompts; with `echo` and `logprobs`, also return the log-probabilities of the prompts."""
        prompts = content.get("prompt")
        if not isinstance(prompts, str | list) or not prompts:
            raise ValueError("prompt is missing or empty")
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        choices = []
        for index, prompt in enumerate(prompts):
            ids = self._template.tokenize(prompt) if isinstance(prompt, str) else list(map(int, prompt))
            choice = await self._complete(ids, content)
            prefix: list[int] = ids if content.get("echo") else []
            text = self._template.decode(prefix) + choice["text"]
            log_p = None
            if content.get("logprobs") is not None:
                log_p = await self._log_probabilities(ids, choice, is_echo=bool(content.get("echo")))
            choices.append(
                {"index": index, "text": text, "logprobs": log_p, "finish_reason": choice["finish_reason"]}
                | {"usage": choice["usage"]}
            )
        return self._answer("text_completion", choices)

    async def chat(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer the last turn of a conversation."""
        messages = content.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages is missing or empty")
        if content.get("chat_template_kwargs"):
            raise ValueError("chat_template_kwargs of a request are not supported; they are an option of the server")
        for name in ("logprobs", "echo"):
            if content.get(name):
                raise ValueError(f"{name} is only supported by /v1/completions")
        ids = self._template.encode_prompt([_with_text(message) for message in messages], content.get("tools"))
        choice = await self._complete(ids, content | {"max_tokens": _max_tokens(content, self._engine.max_length)})
        message = {"role": "assistant", "content": choice["text"]}
        choices = [{"index": 0, "message": message, "finish_reason": choice["finish_reason"], "usage": choice["usage"]}]
        return self._answer("chat.completion", choices)

    async def _complete(self, ids: list[int], content: dict[str, Any]) -> dict[str, Any]:
        # An id outside of the embedding would end the process on a GPU, not only the request.
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"token {token} has no embedding")
        if content.get("model") not in (None, self._name):
            raise ValueError(f"model {content['model']!r} is not served; this server has {self._name!r}")
        if content.get("n") not in (None, 1):
            raise ValueError("n can only be 1")
        sampling = Sampling(
            _max_tokens(content, MAX_TOKENS),
            _temperature(content),
            _number(content, "top_p", 1.0, most=1.0),
            _seed(content),
            stop_token_ids=self._stops,
            log_p=True,
            top_k=max(int(content.get("top_k") or 0), 0),  # vLLM's -1: all tokens
            min_p=_number(content, "min_p", 0.0, most=1.0, can_be_0=True),
            repetition_penalty=_number(content, "repetition_penalty", 1.0, most=MAX_PENALTY),
        )
        begin = time.perf_counter()
        async with self._turn:
            # In a thread, so that the server answers /health and /metrics while it generates.
            (completion,) = await asyncio.to_thread(self._engine.generate, [ids], sampling)
        seconds = time.perf_counter() - begin
        self._throughput = Throughput(
            self._throughput.tokens + len(completion.token_ids), self._throughput.seconds + seconds
        )
        generated: Any = self._template.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        text = generated
        for stop in _stops(content):
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

    async def _log_probabilities(self, ids: list[int], choice: dict[str, Any], *, is_echo: bool) -> dict[str, Any]:
        """Return the log-probabilities of the tokens and, for a prompt, of the most likely tokens at their places."""
        own: list[float | None] = list(choice["log_p"])
        names: list[Any] = list(self._template.tokenizer.convert_ids_to_tokens(choice["ids"]))
        top: list[dict[str, float | None] | None] = [{name: value} for name, value in zip(names, own, strict=True)]
        if is_echo:
            async with self._turn:
                likely, of_likely, of_prompt = await asyncio.to_thread(self._engine.prompt_log_p, ids)
            tokens: list[Any] = list(self._template.tokenizer.convert_ids_to_tokens(ids))
            best: list[Any] = list(self._template.tokenizer.convert_ids_to_tokens(likely))
            at_places = zip(tokens[1:], of_prompt, best, of_likely, strict=True)
            names = tokens + names
            own = [None, *of_prompt, *own]
            top = [None, *({token: its, most: largest} for token, its, most, largest in at_places), *top]
        return {"tokens": names, "token_logprobs": own, "top_logprobs": top}

    def _answer(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usages = [choice.pop("usage") for choice in choices]
        usage = {key: sum(each[key] for each in usages) for key in ("prompt_tokens", "completion_tokens")}
        usage["total_tokens"] = sum(usage.values())
        return {"object": kind, "model": self._name, "created": int(time.time()), "choices": choices, "usage": usage}


def _temperature(content: dict[str, Any]) -> float:
    temperature = content.get("temperature")
    if temperature is None:
        return 1.0
    if not 0 <= float(temperature) <= MAX_TEMPERATURE:
        raise ValueError(f"temperature {temperature} is not between 0 and {MAX_TEMPERATURE:g}")
    return 0.0 if float(temperature) < GREEDY else float(temperature)


def _seed(content: dict[str, Any]) -> int:
    """Return the seed of a request; without one, a random seed, so that sampled answers differ as in other servers."""
    seed = content.get("seed")
    if seed is None:
        return random.getrandbits(31)
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed {seed!r} is not an integer of 64 bits")
    return seed


def _number(content: dict[str, Any], name: str, default: float, *, most: float, can_be_0: bool = False) -> float:
    value = content.get(name)
    if value is None:
        return default
    if not 0 <= float(value) <= most or (float(value) == 0 and not can_be_0):
        raise ValueError(f"{name} {value} is not {'at least' if can_be_0 else 'above'} 0 and at most {most:g}")
    return float(value)


def _max_tokens(content: dict[str, Any], default: int) -> int:
    number = content.get("max_completion_tokens")
    if number is None:
        number = content.get("max_tokens")
    if number is None:
        return default
    if type(number) is not int or number < 1:
        raise ValueError(f"max_tokens {number!r} is not an integer above 0")
    return number


def _with_text(message: Any) -> dict[str, Any]:
    """Return a message whose text may have been sent in parts, which vLLM joins with line breaks as well."""
    if not isinstance(message, dict):
        raise ValueError("a message is not an object with role and content")
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    for part in parts:
        if part.get("type") != "text":
            raise ValueError(f"a part of a message is {part.get('type')!r}; this server reads only text")
    return message | {"content": "\n".join(part["text"] for part in parts)}


def _check_supported(content: Any) -> None:
    """Refuse a request with a field that this server would ignore.

    Raises:
        ValueError: the request has such a field.
    """
    if not isinstance(content, dict):
        raise ValueError("the request is not a JSON object")
    for name in content.keys() - READ - WITHOUT_EFFECT:
        if content[name] and content[name] != DEFAULTS.get(name):
            raise ValueError(f"{name} is not supported by this server")


def _stops(content: dict[str, Any]) -> list[str]:
    stops = content.get("stop") or []
    if isinstance(stops, str):
        stops = [stops]
    return [stop for stop in stops if stop]


def _checked(answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> Callable[[web.Request], Any]:
    """Return a handler that responds with status 400 to invalid requests."""

    async def respond(request: web.Request) -> web.Response:
        try:
            content = await request.json()
            _check_supported(content)
            return web.json_response(await answer(content))
        except (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            problem = {"message": str(error) or type(error).__name__, "type": "invalid_request_error"}
            return web.json_response({"error": problem}, status=400)

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
    web.run_app(service.app(), host=args.host, port=args.port, print=None, handle_signals=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"swiftlite: {error}")
