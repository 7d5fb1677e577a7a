"""Client of SGLang's server. Tested with 0.5.23.

It uses SGLang's native route, because answers of this route include draft counts.
"""

from collections.abc import Sequence

import aiohttp

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.engines.client import Answer, Client, Event, stream
from swiftlite.engines.engine import Sampling
from swiftlite.engines.sglang.engine import draft_counts
from swiftlite.engines.sglang.info import SGLANG


class SglangClient(Client):
    """The `Client` of an SGLang server, whose answers have the counts."""

    info = SGLANG

    def __init__(self, session: aiohttp.ClientSession, sampling: Sampling, num_speculative_tokens: int):
        super().__init__(session, sampling, num_speculative_tokens)
        self._counts = DraftCounts(0, 0, (0,) * num_speculative_tokens)

    async def answer(self, prompt: Sequence[int], salt: str) -> Answer:
        """Complete a prompt; the prefix cache is shared only between prompts with the same salt."""
        request = {
            "input_ids": list(prompt),
            "sampling_params": {
                "temperature": self._sampling.temperature,
                "max_new_tokens": self._sampling.max_new_tokens,
                "stop_token_ids": list(self._sampling.stop_token_ids),
            },
            "extra_key": salt,
            "stream": True,
        }
        answer = read_answer(await stream(self._session, "/generate", request), self._num_tokens)
        if answer.counts:
            self._counts += answer.counts
        self._cached_tokens += answer.cached_tokens
        return answer

    async def draft_counts(self) -> DraftCounts:
        """Return the draft counts since the start of the server."""
        return self._counts


def read_answer(events: Sequence[Event], num_speculative_tokens: int) -> Answer:
    """Read an answer from SGLang's stream, in which each chunk also contains all previous text."""
    seconds, last = events[-1]
    about = last["meta_info"]
    return Answer(
        text=last["text"],
        num_tokens=about["completion_tokens"],
        seconds_to_first=events[0][0],
        seconds=seconds,
        counts=draft_counts(about, num_speculative_tokens),
        cached_tokens=about["cached_tokens"],
    )
