"""Test that vLLM reports the log-probabilities that the trainer computes, with and without drafts; with filters, those
after the filters. Also test that texts end answers.
"""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.data.sample import IGNORED, Sample
from swiftlite.data.template import load_tokenizer
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.engine import Completion, EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.stop_strings import stop_strings
from swiftlite.rollouts.log_probabilities import token_log_probabilities
from tests.engines.joint import filtered
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.completions import policy_options
from tests.train.pairs import open_hf
from tests.train.prepared import prepare

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
TEMPERATURE = 0.7
FILTERS: dict[str, Any] = {"top_p": 0.9, "top_k": 40, "repetition_penalty": 1.4}
STOPS = ("ow", "<|im_end|>")
TOLERANCE = 2e-5
"""Both compute in float32, with sums in different orders."""
PROMPTS = [[1 + place % 7, 4, 2, *range(5, 5 + place % 11)] for place in range(48)]
NEW_TOKENS = 24


SCHEDULE = DraftSchedule({1: 2, 20: 0})
"""With 32 of 48 prompts in progress, nothing is drafted; with the other 16, two tokens."""


def draw(
    directory: Path, num_drafts: int, schedule: DraftSchedule | None
) -> tuple[list[tuple[list[Completion], DraftCounts]], list[list[Completion]]]:
    """Return sampled completions of PROMPTS with the draft counts, without and with filters, and greedy completions,
    without and with texts that end them.
    """
    config = EngineConfig(
        resolve_served(directory),
        "float32",
        num_speculative_tokens=num_drafts,
        max_model_len=128,
        draws_drafts=True,
        draft_schedule=schedule,
    )
    engine: Any = start_engine("vllm", config)
    found = []
    try:
        for filters in ({}, FILTERS):
            before = engine.draft_counts()
            sampling = Sampling(NEW_TOKENS, temperature=TEMPERATURE, log_p=True, **filters)
            completions = engine.generate(PROMPTS, sampling)
            found.append((completions, engine.draft_counts().since(before)))
        stops = stop_strings(STOPS, load_tokenizer(directory))
        greedy = [Sampling(NEW_TOKENS, log_p=True, stop_strings=each) for each in (None, stops)]
        return found, [engine.generate(PROMPTS, each) for each in greedy]
    finally:
        engine.close()


def sample_of(prompt: list[int], completion: Completion) -> Sample:
    """Return prompt and completion with labels on the completion."""
    ids = np.array([*prompt, *completion.token_ids], np.int32)
    is_completion = np.arange(len(ids)) >= len(prompt)
    return Sample(ids, np.where(is_completion, ids, np.int32(IGNORED)), is_completion.astype(np.float32))


@pytest.mark.parametrize(("num_drafts", "schedule"), some_of([(0, None), (2, None), (2, SCHEDULE)], (2, SCHEDULE)))
def test_log_probabilities_are_those_of_the_trainer(num_drafts, schedule, vllm_host, mesh, tmp_path):
    directory = make_tiny_hf(tmp_path / "hf", "qwen3", depth=1, with_tokenizer=True)
    drawn, (whole, cut) = vllm_host.call(partial(draw, directory, num_drafts, schedule))
    run = prepare(policy_options(directory, tmp_path)(temperature=TEMPERATURE), mesh)
    samples = list(map(sample_of, PROMPTS, drawn[0][0]))
    by_trainer = token_log_probabilities(run.train_state.wrapped, mesh, run.batches, samples)
    by_filters = filtered_log_p(directory, drawn[1][0])
    for (completions, _), computed in zip(drawn, (by_trainer, by_filters), strict=True):
        for completion, expected in zip(completions, computed, strict=True):
            assert completion.log_p is not None
            np.testing.assert_allclose(completion.log_p, expected, rtol=0, atol=TOLERANCE)
    if num_drafts:  # so that there are tokens after accepted and after rejected drafts
        completions, counts = drawn[0]
        drafted = counts.drafted / sum(len(completion.token_ids) for completion in completions)
        assert drafted < 0.6 if schedule else drafted > 1
        assert all(0.05 < each.accepted / each.drafted < 0.95 for _, each in drawn)
    check_cut(directory, whole, cut)


def filtered_log_p(directory: Path, completions: list[Completion]) -> list[np.ndarray]:
    """Compute the log-probabilities after the filters with transformers."""
    model, computed = open_hf(directory), []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids, number = [*prompt, *completion.token_ids], len(completion.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -number - 1 : -1]
        texts = [ids[: len(prompt) + place] for place in range(number)]
        p = filtered(logits, texts, TEMPERATURE, **FILTERS)
        computed.append(p[torch.arange(number), torch.tensor(completion.token_ids)].log().numpy())
    return computed


def check_cut(directory: Path, whole: list[Completion], cut: list[Completion]) -> None:
    """Check that answers end with the token that completes a text."""
    tokenizer = load_tokenizer(directory)
    num_stopped = 0
    for answer, ended in zip(whole, cut, strict=True):
        texts = [str(tokenizer.decode(answer.token_ids[:end])) for end in range(1, NEW_TOKENS + 1)]
        ends = [end for end, text in enumerate(texts, start=1) if any(each in text for each in STOPS)]
        expected = answer.until(ends[0]) if ends else answer
        assert (ended.token_ids, ended.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert len(ended.log_p or []) == len(ended.token_ids)
        assert (ended.draft_depths is None) == (answer.draft_depths is None)
        assert ended.draft_depths is None or len(ended.draft_depths) == len(ended.token_ids)
        num_stopped += bool(ends)
    assert 0 < num_stopped < len(whole)
