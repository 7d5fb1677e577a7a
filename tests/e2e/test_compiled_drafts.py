"""Test vLLM with compiled draft models, as by default on a GPU: tokens, counts and draft logits against a reference."""

import importlib.util
import shutil

import pytest

from tests.e2e.test_engines import NEW_TOKENS, compare_draft_logits, expected_counts
from tests.engines.reference import UNDECIDED, Reference, convention, follow, with_vocab
from tests.tiny import make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
]
# By classes of the plugin.
OURS = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "seed_oss"]


def load(directory, family: str) -> Reference:
    return follow(Reference.load(directory, family, depth=1), convention("vllm", family).drafting)


@pytest.mark.slow
def test_it_takes_new_weights(vllm, trained, tmp_path):
    """The compiled code of trunk and draft uses the current parameters."""
    started = make_tiny_hf(tmp_path / "started", "qwen3", depth=1)
    directory, prompts = trained("qwen3", 1, "vllm")
    served = vllm(started, prompts, NEW_TOKENS, 3, weights_of=directory, compile_in=tmp_path / "cache")
    expected, counts = load(directory, "qwen3").simulate(prompts, NEW_TOKENS, 3)
    assert served.num_compiled == 2
    assert (served.token_ids, expected_counts(served.counts)) == (expected, expected_counts(counts))
    assert counts.accepted_per_position[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_tokens"), [("qwen3", 1), ("qwen3", 2), *((family, 3) for family in OURS)])
def test_it_drafts_what_the_reference_does(family, num_tokens, vllm, trained, tmp_path):
    directory, prompts = trained(family, 1, "vllm")
    reference = load(directory, family)
    expected, counts = reference.simulate(prompts, NEW_TOKENS, num_tokens)
    served = vllm(directory, prompts, NEW_TOKENS, num_tokens, num_alone=2, compile_in=tmp_path)
    assert served.num_compiled == 2
    assert (served.token_ids, expected_counts(served.counts)) == (expected, expected_counts(counts))
    for prompt, row, found in zip(prompts, expected, served.logits, strict=False):
        compare_draft_logits(reference, prompt, row, found)


@pytest.mark.slow
def test_it_drafts_from_a_draft_vocabulary(vllm, trained, tmp_path):
    directory, prompts = trained("qwen3", 1, "vllm")
    reference = load(directory, "qwen3")
    reference.draft_vocab = [token for token in range(reference.trunk.config.vocab_size) if token % 4]
    with_vocab(directory, tmp_path / "model", reference.draft_vocab)
    clear = [prompt for prompt in prompts if reference.closest_choice(prompt, NEW_TOKENS, 3) > UNDECIDED]
    expected, counts = reference.simulate(clear, NEW_TOKENS, 3)
    served = vllm(tmp_path / "model", clear, NEW_TOKENS, 3, compile_in=tmp_path / "cache")
    assert served.num_compiled == 2
    assert (served.token_ids, expected_counts(served.counts)) == (expected, expected_counts(counts))
