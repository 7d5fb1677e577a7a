"""Adapt llama.cpp: run its server, with one request per prompt."""

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Lock
from typing import Any

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.errors import UserError
from swiftlite.engines.engine import Completion, EngineConfig, OnAnswer, Sampling, check_prompts
from swiftlite.engines.llamacpp.client import request_of
from swiftlite.engines.llamacpp.gguf_file import gguf_options
from swiftlite.engines.llamacpp.info import LLAMACPP
from swiftlite.engines.llamacpp.program import SHORT_LOG, program
from swiftlite.engines.llamacpp.request import post
from swiftlite.engines.llamacpp.server import SLOTS, draft_numbers, max_length, server_options
from swiftlite.engines.server.metrics import counts_of
from swiftlite.engines.server.process import serve_with_short_log
from swiftlite.engines.server_command import ServerCommand, flags


class LlamacppEngine:
    """The `Engine` that runs llama.cpp's server.

    Raises:
        UserError: llama.cpp is not installed or cannot start, or does not support the model or its heads.
    """

    def __init__(self, config: EngineConfig):
        if config.devices:
            raise UserError("devices are not supported by llama.cpp", "remove devices")
        words = program()
        if words is None:
            raise UserError(f"--infer_backend {LLAMACPP.name}: {LLAMACPP.label} is not installed", LLAMACPP.install)
        model = config.model
        numbers = draft_numbers(model, config.num_speculative_tokens, config.ngrams, heads_draft=config.heads_draft)
        self.num_speculative_tokens = max(numbers.heads, numbers.text)
        self._max_length = max_length(model, config.max_model_len)
        self._slots = min(SLOTS, config.max_batch_size)
        options = server_options(
            model,
            config.torch_dtype,
            numbers,
            config.max_model_len,
            self._slots,
            config.engine_kwargs,
            draws_drafts=config.draws_drafts,
        )
        files = gguf_options(model, config.torch_dtype, drafts=numbers.heads > 0)
        # A free port replaces 0 when the server is started.
        given = {**files, "host": "127.0.0.1", "port": 0, **options}
        command = ServerCommand([*words, *flags(given)], SHORT_LOG)
        self._running = ExitStack()
        served = serve_with_short_log(command, "llama.cpp", "see --llamacpp_engine_kwargs")
        self._server = self._running.enter_context(served)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: OnAnswer | None = None
    ) -> list[Completion]:
        """Complete every prompt and return completions in order, as `Engine.generate` specifies.

        Raises:
            UserError: a prompt leaves no room for an answer, or the server failed.
        """
        check_prompts(prompts, self._max_length)
        one_at_a_time = Lock()

        def answer(place: int) -> Completion:
            completion = self._complete(prompts[place], sampling, sampling.seed_of(place))
            if on_answer:
                # Callers of `generate` expect one call at a time, from whichever thread.
                with one_at_a_time:
                    on_answer(place, completion)
            return completion

        # As many requests at a time as the server has slots: further ones would only wait there.
        with ThreadPoolExecutor(self._slots) as threads:
            return list(threads.map(answer, range(len(prompts))))

    def draft_counts(self) -> DraftCounts:
        """Return the server's counts of steps, drafted and accepted tokens since its start."""
        return counts_of(self._request("/metrics"), LLAMACPP.metrics_prefix, self.num_speculative_tokens)

    def close(self) -> None:
        """Stop the server."""
        self._running.close()

    def _complete(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        # A slot continues the answer of an earlier prompt with the same beginning only with `cache_prompt`.
        request = request_of(prompt, sampling, seed) | {"cache_prompt": False}
        request["n_predict"] = min(sampling.max_new_tokens, self._max_length - len(prompt))
        return cut(json.loads(self._request("/completion", request)), sampling.stop_token_ids)

    def _request(self, path: str, content: dict[str, Any] | None = None) -> str:
        try:
            return post(self._server.url, path, content)
        except OSError as error:
            raise self._server.failure(f"llama.cpp's server does not answer ({error})") from None


def cut(answer: dict[str, Any], stop_token_ids: Iterable[int]) -> Completion:
    """Return a completion that ends at the first stop token.

    The server stops at the tokens that end a generation in its file; other stop tokens are applied here.
    """
    tokens: list[int] = answer["tokens"]
    stops = set(stop_token_ids)
    for place, token in enumerate(tokens):
        if token in stops:
            return Completion(tokens[: place + 1], "stop")
    return Completion(tokens, "stop" if answer["stop_type"] == "eos" else "length")
