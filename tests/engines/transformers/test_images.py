"""Test the transformers engine on prompts with images: answers of transformers' `generate`, counts of a reference."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.engines.engine import Engine, EngineConfig, Sampling, start_engine
from swiftlite.families.resolved import resolve
from tests.engines.reference import Counts
from tests.engines.seeing import NEW_TOKENS, Seeing, as_prompt, make_prompts, simulate, write_seeing
from tests.tiers import some_of


@pytest.fixture(scope="module")
def hf_dir(shared):
    return shared("seeing-qwen3_5-2", lambda directory: write_seeing(directory, "qwen3_5", 2))


@pytest.fixture(scope="module")
def hf(hf_dir) -> Any:
    return AutoModelForImageTextToText.from_pretrained(hf_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(hf_dir, hf) -> list[Any]:
    return make_prompts(hf_dir, Seeing.open(hf_dir, "qwen3_5", 2), hf)


def start(hf_dir, num_tokens: int) -> Engine:
    config = EngineConfig(resolve(hf_dir).with_images(), "float32", num_speculative_tokens=num_tokens, max_images=2)
    return start_engine("transformers", config)


def answers_of(engine: Engine, hf: Any, prompts: list[Any], confidence: float = 0.0) -> list[list[int]]:
    sampling = Sampling(NEW_TOKENS, draft_confidence=confidence)
    completions = engine.generate([as_prompt(hf, prompt) for prompt in prompts], sampling)
    return [completion.token_ids for completion in completions]


def as_counts(found: DraftCounts) -> Counts:
    return Counts(found.drafts, found.drafted, found.accepted_per_position)


@pytest.mark.parametrize(("num_tokens", "confidence"), some_of([(1, 0.0), (3, 0.0), (3, 0.6), (3, 0.97)]))
def test_counts_are_those_of_a_reference(hf_dir, hf, prompts, num_tokens, confidence):
    """The last head also continues from its own state. The number of sure drafts depends on its probabilities."""
    engine = start(hf_dir, num_tokens)
    reference = Seeing.open(hf_dir, "qwen3_5", 2)
    answers, counts = simulate(reference, hf, prompts, num_tokens, confidence)
    assert answers_of(engine, hf, prompts, confidence) == answers
    assert as_counts(engine.draft_counts()) == counts
    assert 0.1 < counts.acceptance_rate < 0.9

    def expected() -> list[Counts]:
        return [simulate(reference, hf, [prompt], num_tokens, confidence)[1] for prompt in prompts]

    of_each = []
    for prompt in prompts:
        before = engine.draft_counts()
        answers_of(engine, hf, [prompt], confidence)
        of_each.append(as_counts(engine.draft_counts().since(before)))
    assert of_each == expected()
    for changed in ("sees_images", "has_axes"):
        setattr(reference, changed, False)
        assert expected() != of_each
        setattr(reference, changed, True)


def test_without_images_the_tower_is_not_loaded(hf_dir, hf, prompts):
    text = [prompt for prompt in prompts if not prompt.images]
    assert text
    engine: Any = start_engine("transformers", EngineConfig(resolve(hf_dir), "float32", num_speculative_tokens=0))
    assert engine._vision_model is None
    assert answers_of(engine, hf, text) == answers_of(start(hf_dir, 0), hf, text)
