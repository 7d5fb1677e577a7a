"""Test that vLLM reports the log-probabilities that the trainer computes, with and without drafts."""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.data.sample import IGNORED, Sample
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.engine import Completion, EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from swiftlite.rollouts.log_probabilities import token_log_probabilities
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.completions import policy_options
from tests.train.prepared import prepare

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
TEMPERATURES = (0.7,)
TOLERANCE = 2e-5
"""Both compute in float32, with sums in different orders."""
PROMPTS = [[1 + place % 7, 4, 2, *range(5, 5 + place % 11)] for place in range(48)]
NEW_TOKENS = 24


SCHEDULE = DraftSchedule({1: 2, 20: 0})
"""With 32 of 48 prompts in progress, nothing is drafted; with the other 16, two tokens."""


def draw(
    directory: Path, num_drafts: int, schedule: DraftSchedule | None
) -> list[tuple[list[Completion], DraftCounts]]:
    """Return the completions of PROMPTS and the draft counts, for each temperature."""
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
        for temperature in TEMPERATURES:
            before = engine.draft_counts()
            completions = engine.generate(PROMPTS, Sampling(NEW_TOKENS, temperature=temperature, log_p=True))
            found.append((completions, engine.draft_counts().since(before)))
    finally:
        engine.close()
    return found


def sample_of(prompt: list[int], completion: Completion) -> Sample:
    """Return prompt and completion with labels on the completion."""
    ids = np.array([*prompt, *completion.token_ids], np.int32)
    is_completion = np.arange(len(ids)) >= len(prompt)
    return Sample(ids, np.where(is_completion, ids, np.int32(IGNORED)), is_completion.astype(np.float32))


@pytest.mark.parametrize(("num_drafts", "schedule"), some_of([(0, None), (2, None), (2, SCHEDULE)], (2, SCHEDULE)))
def test_log_probabilities_are_those_of_the_trainer(num_drafts, schedule, vllm_host, mesh, tmp_path):
    directory = make_tiny_hf(tmp_path / "hf", "qwen3", depth=1, with_tokenizer=True)
    drawn = vllm_host.call(partial(draw, directory, num_drafts, schedule))
    for temperature, (completions, counts) in zip(TEMPERATURES, drawn, strict=True):
        run = prepare(policy_options(directory, tmp_path)(temperature=temperature), mesh)
        samples = list(map(sample_of, PROMPTS, completions))
        computed = token_log_probabilities(run.train_state.wrapped, mesh, run.batches, samples)
        for completion, expected in zip(completions, computed, strict=True):
            assert completion.log_p is not None
            np.testing.assert_allclose(completion.log_p, expected, rtol=0, atol=TOLERANCE)
        if num_drafts:  # so that there are tokens after accepted and after rejected drafts
            drafted = counts.drafted / sum(len(completion.token_ids) for completion in completions)
            assert drafted < 0.6 if schedule else drafted > 1
            assert 0.05 < counts.accepted / counts.drafted < 0.95
