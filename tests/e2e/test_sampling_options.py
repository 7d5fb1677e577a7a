"""Test that vLLM servers with and without drafts answer requests with every sampling option.

At temperature 0 the answers must be equal. At other temperatures this file tests that each request is answered, and
`test_cpu_sampling.py` tests the distribution of the answers.
"""

import importlib.util
import json
import sys
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest

from tests.e2e.test_engines import get, running, wait_for_health
from tests.engines.reference import Reference, convention, follow, write_trained
from tests.stand_ins import forking_vllm_environment
from tests.tiny import make_tiny_tokenizer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
PORT = 8146
URL = f"http://127.0.0.1:{PORT}"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {"11": 100.0}},
    "bad_words": {"bad_words": ["the", "fox jumps"]},
    "allowed_token_ids": {"allowed_token_ids": list(range(2, 310))},
    "n": {"n": 2},
    "seed": {"seed": 7},
    "stop": {"stop": ["a", "o"]},
    "stop_token_ids": {"stop_token_ids": list(range(100, 140))},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": list(range(100, 200))},
    "ignore_eos": {"ignore_eos": True},
    "json": {"structured_outputs": {"json": SCHEMA}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "regex": {"structured_outputs": {"regex": "[ab]{3,9}c"}},
    "logprobs": {"logprobs": 3},
    "logprob_token_ids": {"logprobs": 2, "logprob_token_ids": [11, 12]},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "echo": {"echo": True},
    "beams": {"use_beam_search": True, "n": 2},
}
# With drafts, vLLM refuses these options on every machine, and swiftlite's plugin the last one on a CPU.
REFUSED_WITH_DRAFTS = ("min_p", "logit_bias", "logprob_token_ids")
SEEDS = range(6)


@dataclass(frozen=True)
class Answers:
    """The answers of one server, by request: status and content; status 0 without an answer.

    Attributes:
        is_healthy: whether the server responded after all requests.
        accepted: number of accepted drafts.
        seeded: answers to the same requests with the seeds SEEDS: alone, again, and together with other requests.
    """

    alone: dict[str, tuple[int, Any]]
    together: dict[str, tuple[int, Any]]
    seeded: list[list[tuple[int, Any]]]
    is_healthy: bool
    accepted: float


def single_requests(prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Return requests with one option. vLLM processes the long prompt in two steps."""
    short, long = prompts[1], (prompts[11] * 5)[:80]
    bodies = {}
    for name, options in OPTIONS.items():
        bodies[f"{name}, temperature 0"] = {"prompt": short, "temperature": 0, **options}
        bodies[f"{name}, temperature 1"] = {"prompt": short, "temperature": 1, **options}
        bodies[f"{name}, long prompt"] = {"prompt": long, "temperature": 1, **options}
    return bodies


def paired_requests(prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Return a request for each two options."""
    base = {"prompt": prompts[1], "max_tokens": 8, "temperature": 1}
    pairs = combinations(OPTIONS.items(), 2)
    return {f"{first}, {second}": base | options | others for (first, options), (second, others) in pairs}


def ask(body: dict[str, Any]) -> tuple[int, Any]:
    try:
        return 200, json.loads(get(f"{URL}/v1/completions", {"max_tokens": 16, "return_token_ids": True, **body}))
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def ask_all(prompts: list[list[int]]) -> Answers:
    alone = {name: ask(body) for name, body in single_requests(prompts).items()}
    pairs = paired_requests(prompts)
    seeds = [{"prompt": (prompts[11] * 5)[:80], "temperature": 1.3, "seed": seed} for seed in SEEDS]
    seeded = [[ask(body) for body in seeds] for _ in range(2)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, [*seeds, *pairs.values()]))
    seeded.append(answers[: len(seeds)])
    together = dict(zip(pairs, answers[len(seeds) :], strict=True))
    try:
        metrics = get(f"{URL}/metrics").splitlines()
    except OSError:
        return Answers(alone, together, seeded, False, 0)
    accepted = [line for line in metrics if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    return Answers(alone, together, seeded, True, sum(float(line.split()[-1]) for line in accepted))


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, Answers]:
    """Return the answers of a server with drafts ("mtp") and of one without ("none")."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = make_tiny_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}

    def draft_as(reference: Reference) -> Reference:
        return follow(reference, convention("vllm", "qwen3").drafting)

    sizes = {"vocab_size": len(tokenizer), **special}
    prompts = write_trained(directory, "qwen3", 1, unroll=3, draft_as=draft_as, **sizes)
    tokenizer.save_pretrained(directory)
    words = f"deploy --model {directory} --torch_dtype float32 --port {PORT} --max_model_len 128".split()
    words += ["--vllm_engine_kwargs", '{"max_num_batched_tokens": 64}']
    drafts = {"mtp": ["--num_speculative_tokens", "3"], "none": ["--speculative", "none"]}
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        # vLLM compiles the ranks of logprobs, which takes longer than all requests.
        for variable, value in (forking_vllm_environment() | {"TORCHDYNAMO_DISABLE": "1"}).items():
            patch.setenv(variable, value)
        for name, options in drafts.items():
            log = directory.with_name(f"{name}.log")
            with running([sys.executable, "-m", "swiftlite", *words, *options], log) as server:
                wait_for_health(server, URL, log)
                found[name] = ask_all(prompts)
    return found


@pytest.mark.parametrize("drafts", ["mtp", "none"])
def test_every_request_is_answered(answers, drafts):
    found = answers[drafts]
    asked = found.alone | found.together
    broken = {name: answer for name, answer in asked.items() if answer[0] not in (200, 400)}
    assert not broken
    assert found.is_healthy
    assert (found.accepted > 100) is (drafts == "mtp")


def test_refused_requests_are_the_same(answers):
    """Requests without the options that drafts exclude are refused by both servers or by none."""
    with_drafts = answers["mtp"].alone | answers["mtp"].together
    without = answers["none"].alone | answers["none"].together
    for name, (status, content) in with_drafts.items():
        if not set(name.split(", ")) & set(REFUSED_WITH_DRAFTS):
            assert status == without[name][0], (name, content)
    for option in REFUSED_WITH_DRAFTS:
        name = f"{option}, temperature 1"
        assert (with_drafts[name][0], without[name][0]) == (400, 200)


def test_greedy_answers_are_equal(answers):
    for name, (status, content) in answers["mtp"].alone.items():
        if status != 200 or not name.endswith(", temperature 0"):
            continue
        for choice, expected in zip(content["choices"], answers["none"].alone[name][1]["choices"], strict=True):
            assert choice["token_ids"] == expected["token_ids"], name
            assert choice["finish_reason"] == expected["finish_reason"], name
            assert choice["text"] == expected["text"], name
            if choice["logprobs"]:
                logprobs = choice["logprobs"]["token_logprobs"]
                assert logprobs == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-3), name


@pytest.mark.parametrize("drafts", ["mtp", "none"])
def test_a_seed_is_repeatable(answers, drafts):
    """The answer to a request with a seed depends neither on earlier requests nor on others at the same time."""
    alone, again, together = ([texts(answer) for answer in each] for each in answers[drafts].seeded)
    assert alone == again == together
    assert len(set(map(str, alone))) == len(SEEDS)


def texts(answer: tuple[int, Any]) -> list[str]:
    return [choice["text"] for choice in answer[1]["choices"]]
