"""Test that answers which vLLM samples on a CPU with drafts have the trunk's distribution, with a chi-square test."""

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from tests.engines.chi_square import FALSE_ALARM, probability
from tests.engines.joint import PROMPT, joint_distribution
from tests.tiny import make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
NUM_ANSWERS = 2000


def draw(
    directory: Path,
    temperatures: tuple[float, ...],
    draws_drafts: bool,
    as_shipped: bool = False,
    **filters: Any,
) -> list[tuple[list[list[int]], DraftCounts]]:
    """Return three sampled tokens after PROMPT, with two drafts per step, and the engine's counts, for each
    temperature.

    Args:
        draws_drafts: whether drafts are sampled from the head's distribution; otherwise the most likely tokens are
            drafted.
        as_shipped: whether vLLM's own function is used instead of the plugin's.
        filters: further arguments of `Sampling`.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.sample import rejection_sampler

    assert not HAS_TRITON
    shipped = rejection_sampler.expand_batch_to_tokens
    options: dict[str, Any] = {"num_speculative_tokens": 2, "max_model_len": 64, "draws_drafts": draws_drafts}
    engine: Any = start_engine("vllm", EngineConfig(resolve_served(directory), "float32", **options))
    assert rejection_sampler.expand_batch_to_tokens is not shipped
    if as_shipped:
        rejection_sampler.expand_batch_to_tokens = shipped
    found = []
    try:
        for temperature in temperatures:
            before = engine.draft_counts()
            completions = engine.generate([PROMPT] * NUM_ANSWERS, Sampling(3, temperature=temperature, **filters))
            counts = engine.draft_counts().since(before)
            found.append(([completion.token_ids for completion in completions], counts))
    finally:
        engine.close()
    return found


@pytest.mark.parametrize(
    ("draws_drafts", "temperatures"),
    [
        pytest.param(True, (0.7,), id="drawn"),
        pytest.param(True, (1.0,), id="drawn, 1.0"),
        pytest.param(False, (0.7,), id="likeliest"),
    ],
)
@pytest.mark.slow  # test_ngrams.py draws answers with drafts of heads and of the text
def test_answers_with_drafts_have_the_trunks_distribution(draws_drafts, temperatures, vllm_host, tmp_path):
    """Some drafts are accepted and some rejected. The answers suffice to find a wrong temperature."""
    directory = make_tiny_hf(tmp_path, "qwen3", depth=1, vocab_size=6)
    drawn = vllm_host.call(partial(draw, directory, temperatures, draws_drafts))
    for temperature, (answers, counts) in zip(temperatures, drawn, strict=True):
        assert probability(answers, joint_distribution(directory, 1.0, temperature)) > FALSE_ALARM
        assert probability(answers, joint_distribution(directory, 1.0, 1.2 * temperature)) < FALSE_ALARM
        assert 0.1 < counts.accepted / counts.drafted < 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    "filters", [{"repetition_penalty": 2.0}, {"top_k": 4, "top_p": 0.9, "repetition_penalty": 1.4}]
)
def test_filters_apply_to_drafts(filters, vllm_host, tmp_path):
    directory = make_tiny_hf(tmp_path, "qwen3", depth=1, vocab_size=6)
    ((answers, counts),) = vllm_host.call(partial(draw, directory, (0.7,), True, **filters))
    assert probability(answers, joint_distribution(directory, temperature=0.7, **filters)) > FALSE_ALARM
    assert probability(answers, joint_distribution(directory, temperature=0.7)) < FALSE_ALARM / 1e6
    assert 0.1 < counts.accepted / counts.drafted < 0.95


@pytest.mark.slow
def test_vllm_as_shipped_draws_from_another_distribution(vllm_host, tmp_path):
    """If this test fails, vLLM no longer needs `engines/vllm/cpu_sampling.py`."""
    directory = make_tiny_hf(tmp_path, "qwen3", depth=1, vocab_size=6)
    ((answers, _),) = vllm_host.call(partial(draw, directory, (0.7,), True, as_shipped=True))
    assert probability(answers, joint_distribution(directory, 1.0, 0.7)) < FALSE_ALARM
