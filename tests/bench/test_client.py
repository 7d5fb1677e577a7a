"""All prompts of a round, so many at once."""

import asyncio

import pytest

pytest.importorskip("aiohttp")

from swiftlite.bench.client import ask_all
from swiftlite.engines.client import Answer


class Counting:
    """Answers later prompts sooner, and notes how many it has under way."""

    def __init__(self):
        self.under_way, self.most = 0, 0

    async def answer(self, prompt, salt):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.02 / prompt[0])
        self.under_way -= 1
        return Answer(f"{prompt[0]} {salt}", 1, 0.0, 0.0)

    async def draft_counts(self):
        raise NotImplementedError


def test_prompts_are_answered_in_order_so_many_at_once():
    client = Counting()
    done = asyncio.run(ask_all(client, [[number] for number in range(1, 8)], 3, "x"))
    assert [answer.text for answer in done.answers] == [f"{number} x" for number in range(1, 8)]
    assert client.most == 3
    assert done.seconds > 0
