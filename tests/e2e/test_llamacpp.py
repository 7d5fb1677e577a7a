"""Test real llama.cpp in float32: tokens and draft counts of each request equal those of an independent reference.

One thread per server: with more, llama.cpp waits actively for threads that do not run on a busy machine.
"""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from swiftlite.args.serving_fields import WITH_HEADS
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.llamacpp.client import request_of
from swiftlite.engines.llamacpp.request import post
from swiftlite.engines.llamacpp.server import TEXT_TOKENS
from swiftlite.engines.ngram import Ngrams, ngrams_of
from swiftlite.engines.served_model import resolve_served
from swiftlite.families.serving.llamacpp import ARCHITECTURES
from swiftlite.serve.bench.measure import connect, generate_all
from tests.engines.chi_square import FALSE_ALARM, probability
from tests.engines.joint import TEMPERATURE, joint_distribution
from tests.engines.llamacpp_reference import Request, from_text, norm_as_llamacpp, requests
from tests.engines.reference import UNDECIDED, Reference, convention, follow
from tests.gguf.wordless import write_tokenizer
from tests.llamacpp_here import needs_llamacpp
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

pytestmark = [pytest.mark.engine, needs_llamacpp]
NEW_TOKENS = 24
CASES = [(family, num_tokens) for family in ARCHITECTURES for num_tokens in (1, 3)]
COMPUTES_AGAIN = ("qwen3_next",)
"""Families whose architecture in llama.cpp cannot remove rejected tokens."""


# A family that computes rejected tokens again, and one whose head llama.cpp norms otherwise. Rejected tokens of the
# Qwen3 below are removed. The first of three drafts is that of requests with a single draft.
@pytest.mark.parametrize(("family", "num_tokens"), some_of(CASES, ("qwen3_next", 3), ("nemotron_h", 3)))
def test_requests_equal_the_reference(trained, tmp_path, monkeypatch, family, num_tokens):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    source, prompts = trained(family, 1, "llamacpp")
    reference = follow(Reference.load(source, family, depth=1), convention("llamacpp", family).drafting)
    if family == "nemotron_h":
        norm_as_llamacpp(reference)
    expected = requests(reference, prompts, NEW_TOKENS, num_tokens, computes_again=family in COMPUTES_AGAIN)
    directory = tmp_path / "model"
    shutil.copytree(source, directory)
    check_requests(directory, prompts, num_tokens, expected)


def check_requests(directory: Path, prompts: list[list[int]], num_tokens: int, expected: list[Request]) -> EngineConfig:
    """Check tokens and counts of requests that are sent one after the other; return the config of the engine."""
    vocab_size = resolve_served(directory).config["vocab_size"]
    used = {token for result in expected for token in result.tokens}
    write_tokenizer(directory, vocab_size, next(token for token in range(vocab_size) if token not in used))
    config = EngineConfig(
        resolve_served(directory),
        torch_dtype="float32",
        num_speculative_tokens=num_tokens,
        max_batch_size=1,
        engine_kwargs={"threads": 1},
    )
    engine = start_engine("llamacpp", config)
    found = []
    try:
        for prompt in prompts:
            before = engine.draft_counts()
            (answer,) = engine.generate([prompt], Sampling(NEW_TOKENS))
            counts = engine.draft_counts().since(before)
            found.append(Request(answer.token_ids, counts.drafted, counts.accepted))
    finally:
        engine.close()
    assert found == expected
    share = sum(result.accepted for result in found) / sum(result.drafted for result in found)
    assert 0.05 < share < 0.9  # some right, some wrong
    return config


@pytest.mark.parametrize("speculative", some_of(["ngram", "mtp,ngram"], "mtp,ngram"))
def test_drafts_from_the_text_equal_the_reference(tmp_path, monkeypatch, speculative):
    """Greedy answers of a random model repeat themselves. Counts of requests add up to those of /metrics."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    size, num_tokens = 24, 40
    directory = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, vocab_size=size)
    reference = follow(Reference.load(directory, "qwen3", depth=1), convention("llamacpp", "qwen3").drafting)
    generator = torch.Generator().manual_seed(0)
    prompts = []
    while len(prompts) < 4:
        prompt = torch.randint(0, size, (6,), generator=generator).tolist()
        if reference.closest_choice(prompt, num_tokens, 1) > UNDECIDED:
            prompts.append(prompt)
    expected = requests(reference, prompts, num_tokens, speculative in WITH_HEADS, TEXT_TOKENS, computes_again=False)
    used = {token for result in expected for token in result.tokens}
    write_tokenizer(directory, size, next(token for token in range(size) if token not in used))
    config = EngineConfig(
        resolve_served(directory),
        torch_dtype="float32",
        num_speculative_tokens=None,
        ngrams=ngrams_of(speculative),
        heads_draft=speculative in WITH_HEADS,
        max_batch_size=1,
        engine_kwargs={"threads": 1},
    )
    engine: Any = start_engine("llamacpp", config)
    found = []
    try:
        for prompt in prompts:
            request = request_of(prompt, Sampling(num_tokens), seed=0) | {"cache_prompt": False}
            answer = json.loads(post(engine._server.url, "/completion", request))
            timings = answer["timings"]
            found.append(Request(answer["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)))
        counts = engine.draft_counts()
    finally:
        engine.close()
    assert found == expected
    accepted = sum(result.accepted for result in found)
    assert (counts.drafted, counts.accepted) == (sum(result.drafted for result in found), accepted)
    steps = len(prompts) * num_tokens - accepted
    assert len(prompts) * num_tokens / steps > 1.1
    assert accepted < counts.drafted


FILTERS: dict[str, Any] = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3}


@pytest.mark.parametrize("filters", some_of([{}, FILTERS], {}), ids=["whole", "filtered"])
def test_drawn_drafts_leave_the_trunks_distribution_alone(tmp_path, monkeypatch, filters):
    """Drafts of heads are sampled and verified by rejection, drafts from the text are certain. Answers have the
    distribution of the trunk, also after filters."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    size, end = 7, 6
    directory = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, vocab_size=size)
    write_tokenizer(directory, size, end)
    # After several first tokens, the last two tokens occurred before.
    prompt = [5, 4, 0, 4, 1, 4, 2, 4, 3, 5, 4]
    whole, expected = (
        joint_distribution(directory, num_tokens=size, end=end, prompt=prompt, **each) for each in ({}, filters)
    )
    config = EngineConfig(
        resolve_served(directory),
        torch_dtype="float32",
        num_speculative_tokens=2,
        max_model_len=64,
        draws_drafts=True,
        ngrams=Ngrams(),
        engine_kwargs={"threads": 1},
    )
    engine = start_engine("llamacpp", config)
    try:
        sampling = Sampling(5, temperature=TEMPERATURE, stop_token_ids=(end,), **filters)
        answers = engine.generate([prompt] * 2000, sampling)
        counts = engine.draft_counts()
    finally:
        engine.close()
    found = [[*answer.token_ids, end, end][:3] for answer in answers]
    assert probability(found, expected) > FALSE_ALARM
    if filters:
        assert probability(found, whole) < FALSE_ALARM / 1e6
    assert 0.05 < counts.accepted / counts.drafted < 0.95
    assert sum(bool(from_text([*prompt, tokens[0]], TEXT_TOKENS)) for tokens in found) > len(found) / 10


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotary_positions(tmp_path, monkeypatch, rope):
    """Answers to prompts beyond the original length equal those of transformers."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    size = 128
    directory = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, vocab_size=size, rope_parameters=rope)
    trunk: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
    prompts, expected = [], []
    generator = torch.Generator().manual_seed(0)
    while len(prompts) < 4:
        prompt = torch.randint(1, size, (1, 100), generator=generator)
        row = prompt
        lead = 1.0
        for _ in range(8):
            with torch.no_grad():
                largest, tokens = trunk(row).logits[0, -1].topk(2)
            lead = min(lead, float(largest[0] - largest[1]))
            row = torch.cat((row, tokens[:1][None]), dim=1)
        if lead > UNDECIDED:
            prompts.append(prompt[0].tolist())
            expected.append(row[0, 100:].tolist())
    used = {token for tokens in expected for token in tokens}
    write_tokenizer(directory, size, next(token for token in range(size) if token not in used))
    config = EngineConfig(resolve_served(directory), torch_dtype="float32", engine_kwargs={"threads": 1})
    engine = start_engine("llamacpp", config)
    try:
        found = [answer.token_ids for answer in engine.generate(prompts, Sampling(8))]
    finally:
        engine.close()
    assert found == expected


def test_bench_asks_the_server_many_times(tmp_path, monkeypatch):
    """The server closes a connection after a streamed answer, although its headers promise to keep it."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    directory = make_tiny_hf(tmp_path / "model", "qwen3", depth=0, vocab_size=128)
    write_tokenizer(directory, 128, end=127)
    config = EngineConfig(resolve_served(directory), torch_dtype="float32", engine_kwargs={"threads": 1})
    engine: Any = start_engine("llamacpp", config)

    async def ask():
        async with connect("llamacpp", engine._server.url, Sampling(4), 0) as client:
            return await generate_all(client, [[number] for number in range(1, 33)], 2, "salt")

    try:
        answers = asyncio.run(ask()).answers
    finally:
        engine.close()
    assert [answer.num_tokens for answer in answers] == [4] * 32
