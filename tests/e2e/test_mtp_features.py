"""Test that vLLM and transformers draft with exported MTP heads with features, and count what a reference counts."""

import importlib.util
from functools import partial
from pathlib import Path

import pytest

from swiftlite.families.eagle3 import VLLM_TRUNKS
from tests.e2e.test_eagle3 import LAYERS, exported, sizes_of
from tests.e2e.test_stock_drafts import NEW_TOKENS, counts_of_transformers
from tests.e2e.vllm_here import serve
from tests.engines.feature_reference import FeatureReference, declare
from tests.engines.reference import Counts, Reference, write_trained
from tests.tiers import some_of

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
FEATURES = [1, LAYERS - 1]


def write_drafted(directory: Path, family: str) -> list[list[int]]:
    """Write a model whose drafts are often correct, and return prompts."""

    def draft_as(reference: Reference) -> Reference:
        return FeatureReference.of(reference.trunk, family, FEATURES)

    prompts = write_trained(directory, family, 1, family == "llama", 3, draft_as, **sizes_of(family))
    declare(directory, FEATURES)
    return prompts


CASES = [(family, 3) for family in VLLM_TRUNKS] + [("llama", 1), ("qwen3", 1)]


@pytest.mark.engine
@needs_vllm
@pytest.mark.parametrize(("family", "num_tokens"), some_of(CASES, ("llama", 3)))
def test_counts_of_vllm(family, num_tokens, vllm_host, tmp_path, mesh):
    prompts = write_drafted(tmp_path / "model", family)
    reference = FeatureReference.load(tmp_path / "model", family)
    directory = exported(tmp_path / "model", tmp_path, mesh)
    served = vllm_host.call(partial(serve, directory, prompts, NEW_TOKENS, num_tokens))
    expected, counts = reference.simulate(prompts, NEW_TOKENS, num_tokens)
    assert served.draft.endswith("MtpFeaturesEagle3")
    assert served.token_ids == expected
    found = Counts(served.counts.drafts, served.counts.drafted, served.counts.accepted_per_position)
    assert found == counts == counts_of_transformers(directory, prompts, num_tokens)
    assert 0.1 < counts.accepted_per_position[0] / counts.drafts < 0.9  # some right, some wrong
    assert counts.accepted_per_position[-1] > 0
    reference.features = [1, LAYERS - 2]  # another layer
    assert reference.simulate(prompts, NEW_TOKENS, num_tokens)[1] != counts
