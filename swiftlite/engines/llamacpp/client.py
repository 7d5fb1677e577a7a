"""Client of llama.cpp's server. It uses the route /completion, which accepts tokens, and reads counts from /metrics."""

from collections.abc import Sequence
from typing import Any

import aiohttp

from swiftlite.engines.client import Answer, Client, Event, stream
from swiftlite.engines.engine import Sampling
from swiftlite.engines.llamacpp.info import LLAMACPP


class LlamacppClient(Client):
    """The `Client` of a llama.cpp server."""

    info = LLAMACPP

    def __init__(self, session: aiohttp.ClientSession, sampling: Sampling, num_speculative_tokens: int):
        super().__init__(session, sampling, num_speculative_tokens)
        self._sent: set[tuple[str, tuple[int, ...]]] = set()

    async def answer(self, prompt: Sequence[int], salt: str) -> Answer:
        """Complete a prompt.

        llama.cpp has no salts, and keeps the prompts of all earlier requests in memory. A prompt reads this cache only
        if it was sent before with the same salt.
        """
        key = (salt, tuple(prompt))
        # Prompts of earlier measurements in the cache would shorten the seconds to the first token.
        is_known = key in self._sent
        self._sent.add(key)
        request = request_of(prompt, self._sampling, self._sampling.seed) | {"cache_prompt": is_known, "stream": True}
        answer = read_answer(await stream(self._session, "/completion", request))
        self._cached_tokens += answer.cached_tokens
        return answer


def request_of(prompt: Sequence[int], sampling: Sampling, seed: int) -> dict[str, Any]:
    """Return the content of a request to /completion.

    llama.cpp stops only at the tokens that end a generation in its file (`tokenizer.ggml.eos_token_id` and others), and
    not at all if the request ignores them.
    """
    request = {
        "prompt": list(prompt),
        "n_predict": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # Named explicitly, because llama.cpp's default list also has top_k 40 and min_p.
        "samplers": ["temperature", "top_p"],
        "seed": seed,
        "ignore_eos": not sampling.stop_token_ids,
        "return_tokens": True,
    }
    if sampling.top_k or sampling.min_p or sampling.repetition_penalty != 1:
        request |= {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": len(prompt) + sampling.max_new_tokens,  # the whole text; -1 is refused
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        }
    return request


def read_answer(events: Sequence[Event]) -> Answer:
    """Read an answer from llama.cpp's stream, whose last chunk has no token but the statistics."""
    seconds, last = events[-1]
    chunks = [(when, event) for when, event in events if event.get("tokens")]
    first = chunks[0][0] if chunks else seconds
    return Answer(
        text="".join(event["content"] for _, event in events),
        num_tokens=last["tokens_predicted"],
        seconds_to_first=first,
        seconds=chunks[-1][0] if chunks else seconds,
        cached_tokens=last["timings"].get("cache_n", 0),
    )
