"""Client of vLLM's server. It uses the OpenAI-compatible route, and reads draft counts from /metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.engines.client import Answer, Client, Event, stream
from swiftlite.engines.prompts import ChatPrompt
from swiftlite.engines.server import metrics
from swiftlite.engines.vllm.image_inputs import check_same_length
from swiftlite.engines.vllm.info import VLLM

CACHED_TOKENS = "vllm:prefix_cache_hits_total"


class VllmClient(Client):
    """The `Client` of a vLLM server."""

    info = VLLM

    async def answer(self, prompt: Sequence[int], salt: str) -> Answer:
        """Complete a prompt; the prefix cache is shared only between prompts with the same salt.

        Prompts with images are sent as chat requests, and all other prompts as tokens.

        Raises:
            UserError: the server rejects the request, or divides images into other tokens than swiftlite.
        """
        request: dict[str, Any] = {
            "max_tokens": self._sampling.max_new_tokens,
            "stop_token_ids": list(self._sampling.stop_token_ids),
            "temperature": self._sampling.temperature,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not isinstance(prompt, ChatPrompt):
            return read_answer(await stream(self._session, "/v1/completions", request | {"prompt": list(prompt)}))
        request |= {"messages": prompt.messages}
        if prompt.tools:
            request["tools"] = prompt.tools
        # vLLM applies the chat template and divides images itself, so the number of tokens shows whether both agree.
        events = await stream(self._session, "/v1/chat/completions", request)
        check_same_length(prompt, events[-1][1]["usage"]["prompt_tokens"])
        return read_answer(events)

    async def cached_tokens(self) -> int:
        """Return the number of prompt tokens from the prefix cache since the start of the server."""
        return int(metrics.total(await self._metrics(), CACHED_TOKENS))


def read_answer(events: Sequence[Event]) -> Answer:
    """Read an answer from a stream of chunks; the last chunk contains the number of tokens.

    The first chunk of a chat answer has no text. vLLM sends it with the first token.
    """
    pieces = [(seconds, _text_of(event["choices"][0])) for seconds, event in events if event["choices"]]
    last = events[-1][1]
    return Answer(
        text="".join(text for _, text in pieces),
        num_tokens=last["usage"]["completion_tokens"],
        seconds_to_first=pieces[0][0],
        seconds=pieces[-1][0],
        counts=_draft_counts((last.get("metrics") or {}).get("speculative_decoding")),
    )


def _draft_counts(found: Mapping[str, Any] | None) -> DraftCounts | None:
    """Return the draft counts of one answer, which servers with `per_request_spec_decode_metrics` report.

    Place j of the histogram is the number of steps that accepted exactly j draft tokens.
    """
    if found is None:
        return None
    histogram = found["acceptance_histogram"]
    accepted = tuple(sum(histogram[place:]) for place in range(1, len(histogram)))
    return DraftCounts(found["num_spec_steps"], found["num_draft_tokens"], accepted)


def _text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a chunk of a completion or of a chat answer."""
    if "delta" in choice:
        return choice["delta"].get("content") or ""
    return choice["text"]
