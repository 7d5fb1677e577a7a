"""Test reward models on servers with a small server; `e2e/test_reward_server.py` tests vLLM."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from swiftlite.base.errors import UserError
from swiftlite.methods.reward_names import name_of_server
from swiftlite.rewards.process import RewardProcess
from swiftlite.rewards.server import RewardServer, ServerError
from swiftlite.rewards.settings import RewardSettings
from tests.engines.small_server import serving
from tests.messages import mentions, naming

PROMPTS = [[{"role": "user", "content": f"Say {n}."}] for n in range(5)]
COMPLETIONS = ["yes", "no, " * 9, "", "It is 4.", "perhaps"]


class Judge:
    """A server whose score is the number of characters of the answer.

    Attributes:
        faults: answers of the next requests, instead of scores.
        requests: bodies of the requests for a score.
    """

    def __init__(self) -> None:
        self.name = "judge"
        self.faults: list[Callable[[], Any]] = []
        self.requests: list[dict[str, Any]] = []

    async def respond(self, request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": self.name, "root": f"/models/{self.name}"}]})
        assert request.path == "/classify"
        content = await request.json()
        self.requests.append(content)
        if self.faults:
            fault = self.faults.pop(0)()
            return await fault if asyncio.iscoroutine(fault) else fault
        length = len(content["messages"][-1]["content"])
        await asyncio.sleep(0.01 * (length % 5))  # answers arrive in another order
        return web.json_response({"data": [{"index": 0, "label": "LABEL_0", "probs": [length], "num_classes": 1}]})


@contextmanager
def opened(judge: Judge, timeout: float = 20.0) -> Iterator[RewardProcess]:
    with serving(judge.respond) as url:
        settings = RewardSettings(timeout=timeout, reward_servers=(url,))
        with RewardProcess([name_of_server(url)], (), settings) as rewards:
            judge.requests.clear()  # that of the start
            yield rewards


def score(rewards: RewardProcess) -> Any:
    return rewards.score(PROMPTS, COMPLETIONS, [[1]] * 5, {}, 1)


def test_scores_are_those_of_the_server():
    judge = Judge()
    with opened(judge) as rewards:
        judge.faults = [lambda: web.Response(status=503), lambda: web.Response(status=429)]
        scored = score(rewards)
    assert scored.failures == []
    assert scored.rewards == [[len(text) for text in COMPLETIONS]]
    assert len(judge.requests) == len(COMPLETIONS) + 2  # two were repeated
    conversations = [request.pop("messages") for request in judge.requests]
    pairs = zip(PROMPTS, COMPLETIONS, strict=True)
    turns = [[*prompt, {"role": "assistant", "content": text}] for prompt, text in pairs]
    assert all(each in conversations for each in turns)
    expected = {"use_activation": False, "add_generation_prompt": False, "add_special_tokens": False}
    assert all(request == expected for request in judge.requests)


def answer(content: Any, status: int = 200) -> Callable[[], web.Response]:
    return lambda: web.Response(text=content if isinstance(content, str) else json.dumps(content), status=status)


def test_a_wrong_answer_leaves_completions_without_a_score():
    faults = {
        "JSON <html>": answer("<html>"),
        "out of memory": answer({"error": "out of memory"}),
        "0.5 label": answer({"data": [{"probs": [0.5, 0.5]}]}),
        "much": answer({"data": [{"probs": ["much"]}]}),
        "JSON [[[": answer("[" * 100_000),
        "401": answer('{"data": [{"probs": [1' + "0" * 400 + "]}]}"),  # above the largest float
        "1048576 bytes": answer("x" * 2_000_000),
        "400 too long": answer("this conversation is too long", 400),
        "302": answer("", 302),
        "2 seconds --reward_timeout": lambda: asyncio.sleep(60),
    }
    judge = Judge()
    with opened(judge, timeout=2.0) as rewards:
        for words, fault in faults.items():
            judge.faults = [fault]
            scored = score(rewards)
            assert scored.rewards == [[None] * 5]
            (failure,) = scored.failures
            assert mentions(failure, words)
            judge.faults = []
            assert score(rewards).rewards == [[len(text) for text in COMPLETIONS]]


def test_an_answer_that_is_too_deep_to_be_shown():
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(ServerError, match=naming("/classify JSON")):
        RewardServer("http://a")._score_in({"data": deep})


def test_three_failures_end_the_run():
    judge = Judge()
    with opened(judge) as rewards:
        judge.faults = [answer("no", 400)] * 99
        assert score(rewards).failures
        assert score(rewards).failures
        with pytest.raises(UserError, match=naming("--reward_server 400 /models/judge --resume")):
            score(rewards)


def test_identity_names_the_served_model():
    judge = Judge()
    identities = []
    for name in ("judge", "judge", "other"):
        judge.name = name
        with opened(judge) as rewards:
            identities.append(rewards.identity["models"])
    assert identities[0] == identities[1] != identities[2]


@pytest.mark.parametrize(
    ("respond", "words"),
    [
        (None, "--reward_server Connect"),
        (answer("no such route", 404), "--reward_server 404"),
        (answer({"data": []}), "--reward_server /v1/models"),
        (lambda: asyncio.sleep(60), "--reward_server 1 seconds --reward_timeout"),
    ],
)
def test_an_unsuitable_server_is_refused_at_the_start(respond, words):
    async def handle(request: web.Request) -> web.Response:
        found = respond()
        return await found if asyncio.iscoroutine(found) else found

    with serving(handle) as url:
        url = url if respond else "http://127.0.0.1:9"  # the discard port
        timeout = 1.0 if "--reward_timeout" in words else 30.0  # after the last repetition
        settings = RewardSettings(timeout=timeout, reward_servers=(url,))
        with pytest.raises(UserError, match=naming(words)), RewardProcess(["judge"], (), settings):
            pass
