"""Test the server of the transformers engine: completions, chats, log-probabilities and metrics."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from aiohttp import ClientTimeout
from aiohttp.test_utils import TestClient, TestServer
from transformers import AutoModelForCausalLM

from swiftlite.data.template import ChatTemplate, load_tokenizer, stop_token_ids
from swiftlite.engines.engine import EngineConfig, Sampling
from swiftlite.engines.server.metrics import read_draft_counts, read_throughput
from swiftlite.engines.transformers.engine import TransformersEngine
from swiftlite.engines.transformers.requests import DEFAULTS
from swiftlite.engines.transformers.serve import Service
from swiftlite.engines.transformers.server import PREFIX
from swiftlite.families.resolved import HfModel, resolve
from tests.tiny import make_tiny_hf

PROMPT = [5, 9, 17, 33, 12, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> HfModel:
    return resolve(make_tiny_hf(tmp_path_factory.mktemp("model") / "hf", "qwen3", depth=2, with_tokenizer=True))


def engine_of(model: HfModel, num_tokens: int = 2) -> TransformersEngine:
    return TransformersEngine(EngineConfig(model, "float32", num_speculative_tokens=num_tokens))


def with_client(model: HfModel, use: Callable[[TestClient], Awaitable[Any]], num_tokens: int = 2) -> Any:
    """Return the result of `use` for a client of the server."""
    template = ChatTemplate(load_tokenizer(model.directory))
    service = Service(engine_of(model, num_tokens), template, "tiny", model)

    async def run() -> Any:
        async with TestClient(TestServer(service.app())) as client:
            return await use(client)

    return asyncio.run(run())


def answer(model: HfModel, path: str, num_tokens: int = 2, **content: Any) -> tuple[int, Any]:
    async def use(client: TestClient) -> tuple[int, Any]:
        async with client.post(path, json=content) as response:
            return response.status, await response.json()

    return with_client(model, use, num_tokens)


def test_log_probabilities_are_those_of_transformers(model):
    """Those of the prompt have vLLM's format, which lm-eval reads: none for the first token, and the generated token
    last."""
    status, content = answer(
        model, "/v1/completions", prompt=[PROMPT], echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    assert status == 200
    (choice,) = content["choices"]
    trunk: Any = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    with torch.no_grad():
        log_p = trunk(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None
    expected = [float(log_p[place, token]) for place, token in enumerate(PROMPT[1:])]
    assert found["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-5)  # of float32
    best = [float(value) for value in log_p.max(-1).values]
    assert [max(top.values()) for top in found["top_logprobs"][1:]] == pytest.approx(best, abs=1e-5)
    assert found["token_logprobs"][-1] == pytest.approx(best[-1], abs=1e-5)
    assert content["usage"] == {"prompt_tokens": 6, "completion_tokens": 1, "total_tokens": 7}


def test_filters_are_those_of_the_engine(model):
    filters: dict[str, Any] = {"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.5}
    template = ChatTemplate(load_tokenizer(model.directory))
    sampling = Sampling(12, temperature=2.0, seed=3, stop_token_ids=stop_token_ids(template, model.directory))
    texts = []
    for name in (None, *filters):
        given = {name: filters[name]} if name else {}
        (expected,) = engine_of(model).generate([PROMPT], replace(sampling, **given))
        _, found = answer(model, "/v1/completions", prompt=[PROMPT], max_tokens=12, temperature=2.0, seed=3, **given)
        texts.append(found["choices"][0]["text"])
        assert texts[-1] == template.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert len(set(texts)) > 1


def test_answers_and_metrics_are_those_of_the_engine(model):
    stops = stop_token_ids(ChatTemplate(load_tokenizer(model.directory)), model.directory)
    engine = engine_of(model)
    (completion,) = engine.generate([PROMPT], Sampling(20, stop_token_ids=stops))

    async def use(client: TestClient) -> tuple[Any, str]:
        async with client.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        ) as response:
            content = await response.json()
        async with client.get("/metrics") as response:
            return content, await response.text()

    content, text = with_client(model, use)
    assert content["choices"][0]["text"] == load_tokenizer(model.directory).decode(
        completion.token_ids, skip_special_tokens=True
    )
    assert read_draft_counts(text, PREFIX) == engine.draft_counts()
    assert read_throughput(text, PREFIX).tokens == len(completion.token_ids)
    assert read_throughput(text, PREFIX).seconds > 0
    _, plain = with_client(model, use, num_tokens=0)
    assert read_draft_counts(plain, PREFIX) is None


def test_a_chat_is_a_completion_of_its_template(model):
    messages = [{"role": "user", "content": "word1 number2"}]
    ids = ChatTemplate(load_tokenizer(model.directory)).encode_prompt(messages)
    _, completed = answer(model, "/v1/completions", prompt=ids, max_tokens=8, temperature=0)
    _, chatted = answer(model, "/v1/chat/completions", messages=messages, max_tokens=8, temperature=0)
    assert chatted["choices"][0]["message"] == {"role": "assistant", "content": completed["choices"][0]["text"]}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "logprobs": True}, "logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        *(({"messages": [{"role": "user", "content": [part]}]}, "text") for part in ("a", {"type": "text"}, 5)),
        *(({"messages": value}, "message") for value in (["word1"], [], None, {"role": "user"})),
        ({"messages": [{"role": "user", "content": "a"}], "tools": {"a": 1}}, "tools"),
    ],
)
def test_invalid_chats_are_refused(model, content, word):
    status, found = answer(model, "/v1/chat/completions", **content)
    assert status == 400
    assert word in json.dumps(found)


def test_a_text_in_parts_is_one_text(model):
    parts = [{"type": "text", "text": "word1"}, {"type": "text", "text": "number2"}]
    contents = [parts, "word1\nnumber2"]
    found = []
    for content in contents:
        messages = [{"role": "user", "content": content}]
        status, chat = answer(model, "/v1/chat/completions", messages=messages, max_tokens=8, temperature=0)
        assert status == 200
        found.append((chat["usage"], chat["choices"]))
    assert found[0] == found[1]


def test_variables_of_the_template_are_an_option_of_the_server(model):
    messages = [{"role": "user", "content": "word1"}]
    kwargs = {"enable_thinking": False}
    status, found = answer(model, "/v1/chat/completions", messages=messages, max_tokens=8, chat_template_kwargs=kwargs)
    assert status == 400
    assert "chat_template_kwargs" in json.dumps(found)


def test_a_stop_text_ends_an_answer(model):
    _, whole = answer(model, "/v1/completions", prompt=PROMPT, max_tokens=20, temperature=0)
    text = whole["choices"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    _, cut = answer(model, "/v1/completions", prompt=PROMPT, max_tokens=20, temperature=0, stop=[stop])
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**9]}, "1000000000"),
        ({"prompt": [-1]}, "-1"),
        *(({"prompt": PROMPT, name: True}, name) for name in ("stream", "logit_bias", "response_format", "unknown")),
        ({"prompt": PROMPT, "seed": "a"}, "seed"),
        ({"prompt": PROMPT, "seed": 2**70}, "seed"),
        ({"prompt": PROMPT * 1000}, "6000"),
        ({"prompt": PROMPT, "max_tokens": "x"}, "x"),
        ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens"),
        ({"prompt": PROMPT, "max_completion_tokens": None, "max_tokens": 0}, "max_tokens"),
        ({"prompt": PROMPT, "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": PROMPT, "temperature": -1}, "temperature"),
        ({"prompt": PROMPT, "top_p": 2}, "top_p"),
        ({"prompt": PROMPT, "min_p": -1}, "min_p"),
        ({"prompt": PROMPT, "repetition_penalty": 0}, "repetition_penalty"),
        *(({"prompt": PROMPT, "n": value}, "n ") for value in (3, "1", 0)),
        *(
            ({"prompt": value}, "prompt")
            for value in (7, "", [""], [[]], ["a", 5], [[5], "a"], [1.5], [True], {"a": 1})
        ),
        *(({"prompt": PROMPT, "temperature": value}, "temperature") for value in ("0", True, [1], float("nan"), 1e9)),
        *(({"prompt": PROMPT, "stop": value}, "stop") for value in ({}, 5, [5], {"a": "b"})),
        *(({"prompt": PROMPT, name: "0"}, name) for name in ("top_k", "top_p", "min_p", "echo", "logprobs")),
        *(({"prompt": PROMPT, "logprobs": value}, "logprobs") for value in (False, -1, 2)),
        ({"prompt": PROMPT, "repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"prompt": PROMPT, "chat_template_kwargs": {"a": 1}}, "option of the server"),
    ],
)
def test_invalid_requests_are_refused(model, content, word):
    status, found = answer(model, "/v1/completions", **content)
    assert status == 400
    assert word in json.dumps(found)


def test_fields_that_ask_for_nothing_else_are_accepted(model):
    fields: dict[str, Any] = {**DEFAULTS, "stream": False, "logit_bias": {}, "frequency_penalty": 0, "user": "me"}
    fields["tool_choice"] = "none"
    status, found = answer(model, "/v1/completions", prompt=PROMPT, max_tokens=2, **fields)
    assert status == 200, found


def test_sampled_answers_differ_without_a_seed(model):
    request: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "temperature": 2.0}

    async def use(client: TestClient) -> list[str]:
        texts = []
        for seed in ({}, {}, {"seed": 5}, {"seed": 5}):
            async with client.post("/v1/completions", json=request | seed) as response:
                texts.append((await response.json())["choices"][0]["text"])
        return texts

    one, other, seeded, again = with_client(model, use)
    assert one != other
    assert seeded == again


def test_routes_of_the_server(model):
    async def use(client: TestClient) -> tuple[int, Any, int]:
        async with client.get("/health") as health, client.get("/v1/models") as models, client.get("/no") as other:
            return health.status, await models.json(), other.status

    health, models, other = with_client(model, use)
    assert (health, other) == (200, 404)
    assert [each["id"] for each in models["data"]] == ["tiny"]


def test_a_client_that_disconnects_ends_its_request(model):
    """The prompt that is being completed is the last one of the request, and the next request waits for its end."""
    engine = engine_of(model)
    completed = []
    generate = engine.generate

    def generate_slowly(prompts: Any, sampling: Sampling) -> Any:
        time.sleep(0.3)
        completed.append(prompts)
        return generate(prompts, sampling)

    engine.generate = generate_slowly  # type: ignore[method-assign]
    template = ChatTemplate(load_tokenizer(model.directory))
    service = Service(engine, template, "tiny", model)
    request: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
    many = {"prompt": [PROMPT] * 50, **request}

    async def use() -> int:
        async with TestClient(TestServer(service.app())) as client:
            with pytest.raises(asyncio.TimeoutError):
                await client.post("/v1/completions", json=many, timeout=ClientTimeout(0.1))
            async with client.post("/v1/completions", json={"prompt": PROMPT, **request}) as response:
                return response.status

    assert asyncio.run(use()) == 200
    assert len(completed) == 2


@pytest.mark.parametrize(
    ("content_type", "status"), [("application/json; charset=foo", 400), ("application/json; charset=utf-8", 200)]
)
def test_the_charset_of_a_request(model, content_type, status):
    async def use(client: TestClient) -> int:
        headers = {"Content-Type": content_type}
        async with client.post("/v1/completions", data=json.dumps({"prompt": PROMPT}), headers=headers) as response:
            return response.status

    assert with_client(model, use) == status
