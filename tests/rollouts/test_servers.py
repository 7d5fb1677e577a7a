"""Test generating with several servers: distribution of prompts, failures, weights, rejected options.

tests/e2e/test_rollout_servers.py uses real vLLM servers.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from swiftlite import rules
from swiftlite.base.errors import OptionError, UserError
from swiftlite.data.template import load_tokenizer
from swiftlite.engines.engine import Completion, EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.stop_strings import stop_strings
from swiftlite.engines.vllm import served
from swiftlite.engines.vllm.served import LostServer, ServedVllm
from swiftlite.rollouts import servers as module
from swiftlite.rollouts.generation import Generation
from swiftlite.rollouts.servers import Requirements, RolloutServers, check_responding
from tests.messages import naming
from tests.rollouts.small_vllm import SmallVllm, started
from tests.tiny import make_tiny_hf
from tests.train.completions import policy_options, train
from tests.weights_of import trunk_and_heads

PROMPTS = [[index + 1, 7, 3] for index in range(12)]
SAMPLING = Sampling(6, temperature=0.7, numbers=tuple(range(100, 112)), log_p=True)
REWARDS = """
def even(completion_ids):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


async def talk(messages, generate):
    messages = [*messages, await generate(messages, max_tokens=4), {"role": "user", "content": "Why?"}]
    return [*messages, await generate(messages)]
"""


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("model") / "hf", "qwen3", depth=1, with_tokenizer=True)


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory) -> Path:
    """Return a model of the same shapes with other weights."""
    directory = tmp_path_factory.mktemp("other") / "hf"
    return make_tiny_hf(directory, "qwen3", depth=1, with_tokenizer=True, seed=1)


@pytest.fixture
def pair(hf_dir):
    """Yield two servers and their addresses."""
    servers = [SmallVllm(hf_dir), SmallVllm(hf_dir)]
    with ExitStack() as stack:
        yield servers, [stack.enter_context(started(server)) for server in servers]


def connect(hf_dir: Path, urls: list[str], max_in_flight: int = 2, **required) -> RolloutServers:
    requirements = Requirements(**{"model": resolve_served(hf_dir), "max_length": 64, "drafts": True} | required)
    return RolloutServers(urls, requirements, max_in_flight, timeout=30)


@cache
def expected(directory: Path) -> list:
    """Return the completions of an engine in this process."""
    config = EngineConfig(resolve_served(directory), "float32", num_speculative_tokens=1, draws_drafts=True)
    engine = start_engine("transformers", config)
    return engine.generate(PROMPTS, SAMPLING)


def assert_equal(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Check that answers are equal, and their log-probabilities up to the rounding of float32.

    A server computes in other threads than this one, and kernels of some processors round differently there. With other
    weights, tokens differ as well.
    """
    for own, other in zip(found, expected, strict=True):
        assert (own.token_ids, own.finish_reason) == (other.token_ids, other.finish_reason)
        np.testing.assert_allclose(own.log_p or (), other.log_p or (), rtol=0, atol=1e-5)


def test_prompts_are_given_to_the_server_with_the_fewest(hf_dir, pair):
    (fast, slow), urls = pair
    fast.holds = lambda: fast.most_in_flight < 2
    slow.holds = lambda: fast.num_completed < 8
    engine = connect(hf_dir, urls)
    before = engine.draft_counts()
    places = []
    completions = engine.generate(PROMPTS, SAMPLING, on_answer=lambda place, _: places.append(place))
    assert_equal(completions, expected(hf_dir))
    assert sorted(places) == list(range(12))
    assert fast.num_completed > slow.num_completed > 0
    assert fast.most_in_flight == slow.most_in_flight == 2
    counted = [server.engine.draft_counts() for server in (fast, slow)]
    assert engine.draft_counts().since(before) == counted[0] + counted[1]
    assert engine.figures() == {"rollout/servers": 2, "rollout/repeated_requests": 0}
    engine.close()


def test_servers_receive_all_sampling_options(hf_dir, pair):
    _, urls = pair
    tokenizer = load_tokenizer(hf_dir)
    options: dict[str, Any] = {"top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.4}
    sampling = replace(
        SAMPLING, max_new_tokens=24, **options, stop_strings=stop_strings(("e", "<|im_end|>"), tokenizer)
    )
    engine = connect(hf_dir, urls)
    own = start_engine("transformers", EngineConfig(resolve_served(hf_dir), "float32", num_speculative_tokens=1))
    wanted = own.generate(PROMPTS, sampling)
    assert_equal(engine.generate(PROMPTS, sampling), wanted)
    assert 0 < sum(each.finish_reason == "stop" for each in wanted) < len(PROMPTS)
    engine.close()


def die_at(server: SmallVllm, path: str, number: int = 1) -> None:
    """Let a server die at a request to a path."""
    seen = []

    def before(asked: str) -> None:
        seen.append(asked)
        if seen.count(path) == number:
            server.is_dead = True

    server.before = before


@pytest.mark.parametrize("failure", ["dead", "abort"])
def test_prompts_of_a_lost_server_are_given_to_the_others(hf_dir, pair, failure):
    (_, bad), urls = pair
    engine = connect(hf_dir, urls)
    if failure == "dead":
        die_at(bad, "/v1/completions", 2)
    else:
        bad.finish_reason = "abort"  # of a server that is stopped
    assert_equal(engine.generate(PROMPTS, SAMPLING), expected(hf_dir))
    figures = engine.figures()
    assert figures["rollout/servers"] == 1
    assert 1 <= figures["rollout/repeated_requests"] <= 2
    bad.before, bad.finish_reason = lambda path: None, None
    bad.start()
    completed = bad.num_completed
    assert_equal(engine.generate(PROMPTS, SAMPLING), expected(hf_dir))
    assert bad.num_completed == completed  # it has no weights of the trainer yet
    engine.update_weights(*trunk_and_heads(hf_dir))
    assert bad.num_updates == 2
    assert_equal(engine.generate(PROMPTS, SAMPLING), expected(hf_dir))
    assert engine.figures() == {"rollout/servers": 2, "rollout/repeated_requests": 0}
    assert bad.num_completed > completed


def test_a_server_that_hangs_or_was_restarted_is_lost(hf_dir, pair, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_CHECKS", 0.2)
    (_, bad), urls = pair
    engine = connect(hf_dir, urls)
    bad.delay = 3600
    bad.before = lambda path: path == "/v1/completions" and bad.config.update(instance_id="another")
    assert_equal(engine.generate(PROMPTS, SAMPLING), expected(hf_dir))
    assert engine.figures() == {"rollout/servers": 1, "rollout/repeated_requests": 2}


@pytest.fixture(scope="module")
def single(hf_dir):
    """Yield a server and its client."""
    server = SmallVllm(hf_dir)
    with started(server) as url:
        yield server, ServedVllm(url, model=resolve_served(hf_dir))


def in_choice(**changed) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that replaces fields of the only completion of an answer."""
    return lambda answer: {"choices": [answer["choices"][0] | changed]}


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: "a page",
        lambda answer: {"choices": answer["choices"] * 2},
        in_choice(token_ids=None),
        in_choice(token_ids=[], logprobs={"token_logprobs": []}),
        in_choice(token_ids=[5] * 7, logprobs={"token_logprobs": [-1.0] * 7}),
        in_choice(token_ids=[10**6] * 6),
        in_choice(token_ids=[-1] * 6),
        in_choice(token_ids=[1.5] * 6),
        in_choice(logprobs=None),
        in_choice(logprobs={"token_logprobs": [-1.0]}),
        in_choice(logprobs={"token_logprobs": [float("nan")] * 6}),
    ],
)
def test_completions_that_vllm_does_not_give(single, change):
    server, client = single
    server.change = lambda path, answer: change(answer) if path == "/v1/completions" else answer
    with pytest.raises(LostServer, match=naming(client.url)):
        client.generate(PROMPTS[:1], replace(SAMPLING, numbers=()))


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/server_info", ServedVllm.is_running),
        ("/is_paused", lambda client: ServedVllm(client.url)),
        ("/metrics", ServedVllm.draft_counts),
        ("/weight_info", ServedVllm.weight_version),
    ],
)
def test_pages_of_another_program(single, path, ask):
    server, client = single
    server.change = lambda asked, answer: "a page" if asked == path else answer
    if path == "/server_info":
        assert not ask(client)
    else:
        with pytest.raises(LostServer, match=naming(client.url)):
            ask(client)


@pytest.mark.parametrize("path", ["/pause", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"])
def test_weights_are_sent_to_the_servers_that_are_left(hf_dir, other_dir, pair, path):
    (good, bad), urls = pair
    engine = connect(hf_dir, urls)
    die_at(bad, path)
    trunk, heads = trunk_and_heads(other_dir)
    engine.update_weights(trunk, heads)
    assert good.num_updates == 2
    assert not good.is_paused
    assert_equal(engine.generate(PROMPTS, SAMPLING), expected(other_dir))
    assert engine.figures()["rollout/servers"] == 1
    bad.before = lambda path: None
    bad.start()
    engine.update_weights(*trunk_and_heads(other_dir))
    assert bad.num_updates == 2
    assert_equal(engine.generate(PROMPTS, SAMPLING), expected(other_dir))
    assert engine.figures()["rollout/servers"] == 2


def test_a_server_that_hangs_does_not_delay_generations(hf_dir, pair, monkeypatch):
    monkeypatch.setattr(served, "_QUICK", 0.2)
    (_, bad), urls = pair
    engine = connect(hf_dir, urls)
    die_at(bad, "/pause")
    engine.update_weights(*trunk_and_heads(hf_dir))
    bad._answer = _never  # type: ignore[method-assign]
    bad.before, bad.is_dead = lambda path: None, False
    start = time.monotonic()
    engine.update_weights(*trunk_and_heads(hf_dir))
    assert time.monotonic() - start < 15  # a connection has 30 seconds
    assert engine.figures()["rollout/servers"] == 1


async def _never(path: str, body: dict[str, Any]) -> Any:
    await asyncio.sleep(3600)


def test_a_server_that_was_restarted_unseen_gets_weights(hf_dir, other_dir, pair):
    (_, restarted), urls = pair
    engine = connect(hf_dir, urls)
    restarted.start()
    engine.update_weights(*trunk_and_heads(other_dir))
    assert_equal(engine.generate(PROMPTS, SAMPLING), expected(other_dir))
    assert restarted.num_completed > 0


def test_reading_buckets_goes_on_without_servers(hf_dir, pair):
    """Reading is collective: other ranks would wait for this one."""
    servers, urls = pair
    engine = connect(hf_dir, urls)
    for server in servers:
        die_at(server, "/update_weights")
    read = []

    def buckets():
        for name, tensor in load_file(hf_dir / "model.safetensors").items():
            if not name.startswith("mtp."):
                yield {name: tensor}
        read.append(True)

    engine.update_weights(buckets(), None)
    assert read
    with pytest.raises(UserError, match=naming(f"--rollout_server {urls[0]} {urls[1]} --resume")):
        engine.generate(PROMPTS, SAMPLING)


def test_an_error_of_the_trainer_is_not_one_of_the_servers(hf_dir, pair):
    _, urls = pair
    engine = connect(hf_dir, urls)

    def buckets():
        yield {"model.norm.weight": torch.ones(1)}
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.update_weights(buckets(), None)


def test_no_server_responds(hf_dir, pair):
    servers, urls = pair
    for server in servers:
        server.is_dead = True
    for check in (connect, lambda _, urls: check_responding(urls)):
        with pytest.raises(UserError, match=naming(f"--rollout_server {urls[0]} {urls[1]}")):
            check(hf_dir, urls)
    servers[1].is_dead = False
    check_responding(urls)
    assert connect(hf_dir, urls).figures()["rollout/servers"] == 1


def test_a_request_that_a_server_rejects_is_an_error(hf_dir, pair):
    _, urls = pair
    engine = connect(hf_dir, urls)
    with pytest.raises(UserError, match=naming("--max_model_len 64")):
        engine.generate([[1] * 64], SAMPLING)


@pytest.mark.parametrize(
    ("change", "required", "problem"),
    [
        ({"weight_transfer_config": None}, {}, "--live_weights"),
        ({"model_config": {"logprobs_mode": "raw_logprobs"}}, {}, "raw_logprobs --live_weights"),
        ({}, {"max_length": 256}, "128 --max_length 256 --max_model_len"),
        ({"speculative_config": None}, {}, "--speculative mtp"),
        ({}, {"drafts": False}, "--speculative none"),
        ({}, {"num_speculative_tokens": 3}, "--num_speculative_tokens 3"),
        ({"instance": True}, {}, "--live_weights"),
    ],
)
def test_servers_with_other_options_are_rejected(hf_dir, pair, change, required, problem):
    (_, other), urls = pair
    if "instance" in change:
        other.config = {}
        other._answer = _no_vllm  # type: ignore[method-assign]
    for name, value in change.items():
        other.config[name] = {**other.config[name], **value} if isinstance(value, dict) else value
    with pytest.raises(UserError, match=naming(f"--rollout_server {urls[1]} {problem}")):
        connect(hf_dir, urls[1:], **required)


async def _no_vllm(path: str, body: dict[str, Any]) -> Any:
    return "a page"


def test_servers_must_be_alike(hf_dir, pair):
    (_, other), urls = pair
    other.config["speculative_config"]["num_speculative_tokens"] = 2
    with pytest.raises(UserError, match=naming(f"--rollout_server {urls[1]} {urls[0]} --num_speculative_tokens")):
        connect(hf_dir, urls)


def test_servers_of_another_model_are_rejected(hf_dir, tmp_path):
    server = SmallVllm(make_tiny_hf(tmp_path / "llama", "llama", depth=1))
    with started(server) as url, pytest.raises(UserError, match=naming(f"--rollout_server {url} --model {hf_dir}")):
        connect(hf_dir, [url])


@pytest.fixture
def options(hf_dir, tmp_path):
    plugin = tmp_path / "rewards.py"
    plugin.write_text(REWARDS)
    usual: dict[str, Any] = {
        "reward_funcs": ["even"],
        "external_plugins": [str(plugin)],
        "train_iters": 3,
        "micro_batch_size": 4,
        "max_completion_length": 8,
        "lr": 1e-2,
    }
    make = policy_options(hf_dir, tmp_path)
    return lambda **changed: make(**usual | changed)


def test_a_run_with_servers_equals_one_with_an_engine(options, mesh, pair, tmp_path):
    """Completions are conversations. One server dies in the second generation and is restarted before the third one."""
    (_, bad), urls = pair
    changed = {"rollout_func": "talk", "max_completion_length": 40}
    alone = train(options(output_dir=str(tmp_path / "alone"), **changed), mesh)
    starts = []

    def before(path: str) -> None:
        starts.append(path)
        if starts.count("/start_weight_update") == 2 and path == "/v1/completions":
            bad.is_dead = True
        if bad.is_dead and (tmp_path / "served" / "rollouts" / "000001.safetensors").exists():
            bad.before = lambda path: None
            bad.start()

    bad.before = before
    served = train(options(output_dir=str(tmp_path / "served"), rollout_server=urls, max_batch_size=3, **changed), mesh)
    for number in range(3):
        name = f"rollouts/{number:06d}.safetensors"
        one, other = Generation.load(alone / name), Generation.load(served / name)
        assert np.array_equal(one.completion_ids, other.completion_ids)
        assert np.array_equal(one.is_generated, other.is_generated)
        assert np.array_equal(one.engine_log_p, other.engine_log_p, equal_nan=True)
        assert not one.is_generated.all()
    lines = [json.loads(line) for line in (served / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/servers"] for line in lines] == [2, 1, 2]
    assert [line["rollout/repeated_requests"] > 0 for line in lines] == [False, True, False]
    expected_lines = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [line["loss"] for line in expected_lines]
    assert lines[0]["rollout/acceptance_1"] == expected_lines[0]["rollout/acceptance_1"]


def test_a_run_whose_servers_die_can_be_resumed(options, mesh, pair, tmp_path):
    servers, urls = pair
    alone = train(options(output_dir=str(tmp_path / "alone"), save_steps=1), mesh)
    for server in servers:
        die_at(server, "/start_weight_update", 2)
    served = {"output_dir": str(tmp_path / "served"), "rollout_server": urls, "save_steps": 1}
    with pytest.raises(UserError, match=naming("--rollout_server --resume")):
        train(options(**served), mesh)
    for server in servers:
        server.before = lambda path: None
        server.start()
    run = train(options(**served, resume=True), mesh)
    name = "rollouts/000002.safetensors"
    one, other = Generation.load(alone / name), Generation.load(run / name)
    assert np.array_equal(one.completion_ids, other.completion_ids)


@pytest.mark.parametrize(
    ("addresses", "problem"),
    [
        (["localhost:8000"], "--rollout_server localhost:8000"),
        (["http://a:1", "http://a:1/"], "--rollout_server http://a:1"),
    ],
)
def test_addresses_are_checked(options, addresses, problem):
    with pytest.raises(OptionError, match=naming(problem)):
        rules.check(options(rollout_server=addresses), 1)
