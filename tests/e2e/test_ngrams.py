"""Test drafts from the text, joined with those of a head: vLLM on a CPU against the transformers engine."""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.ngram import Ngrams
from swiftlite.engines.served_model import resolve_served
from tests.engines.chi_square import FALSE_ALARM, probability
from tests.engines.joint import PROMPT, joint_distribution
from tests.tiny import make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
ALWAYS = Ngrams(min_match=1, min_match_drawn=1, max_match=3, max_tokens=3)
"""With a vocabulary of six tokens, most steps find a match, and most drafts of it are rejected."""
REPETITIVE = [[1, 2, 3, 4, 5, 1, 2], [5, 4, 3], [0, 1, 0, 1, 0, 1], [2], [3, 3, 2, 5, 1, 3, 3]]
GREEDY = (REPETITIVE, Sampling(60))
DRAWN = ([PROMPT] * 2000, Sampling(3, temperature=0.7))
Answers = list[tuple[list[list[int]], DraftCounts]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("model"), "qwen3", depth=1, vocab_size=6)


def ask(name: str, model: Path, *requests: tuple[list[list[int]], Sampling], **changed: Any) -> Answers:
    """Return the answers of an engine to each list of prompts, and its counts."""
    options = {"num_speculative_tokens": 1, "draws_drafts": True, "ngrams": ALWAYS, "max_model_len": 96} | changed
    engine: Any = start_engine(name, EngineConfig(resolve_served(model), "float32", **options))
    found = []
    try:
        for prompts, sampling in requests:
            before = engine.draft_counts()
            completions = engine.generate(prompts, sampling)
            found.append(([each.token_ids for each in completions], engine.draft_counts().since(before)))
    finally:
        engine.close()
    return found


@pytest.fixture(scope="module")
def in_vllm(vllm_host, model) -> Answers:
    return vllm_host.call(partial(ask, "vllm", model, GREEDY, DRAWN))


def test_greedy_counts_equal_those_of_transformers(model, in_vllm):
    ((plain, _),) = ask("transformers", model, GREEDY, num_speculative_tokens=0, ngrams=None)
    ((answers, counts),) = ask("transformers", model, GREEDY)
    assert answers == plain
    assert 0 < counts.ngram.drafts < counts.drafts
    found, of_vllm = in_vllm[0]
    assert found == plain
    assert of_vllm == counts


@pytest.mark.parametrize("engine", ["vllm", pytest.param("transformers", marks=pytest.mark.slow)])
def test_drawn_answers_have_the_trunks_distribution(model, in_vllm, engine):
    found = in_vllm[1:] if engine == "vllm" else ask(engine, model, DRAWN)
    ((answers, counts),) = found
    assert 0 < counts.ngram.accepted < counts.accepted
    assert probability(answers, joint_distribution(model, 1.0, 0.7)) > FALSE_ALARM
    assert probability(answers, joint_distribution(model, 1.0, 0.7 * 1.2)) < FALSE_ALARM
    assert 0.1 < counts.accepted / counts.drafted < 0.95
