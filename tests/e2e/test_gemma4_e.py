"""Test engines with heads and assistants of a Gemma 4 whose layers share keys and values, like E2B: vLLM and the
transformers engine count what a reference counts."""

import importlib.util
from functools import partial

import pytest

from tests.e2e.drafted import exported
from tests.e2e.test_gemma4_assistant import DRAFT_CLASS
from tests.e2e.test_stock_drafts import NEW_TOKENS, counts_of_transformers, report_of
from tests.e2e.vllm_here import serve
from tests.engines.gemma4_assistant_reference import CLUSTERS, AssistantReference, config_for, declare, settings_of
from tests.engines.reference import Reference, write_trained
from tests.tiny import GEMMA4_E

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
SOURCES = (1, 2)
"""Layers of `GEMMA4_E` whose keys and values others read."""


def test_counts_of_heads(vllm_host, tmp_path):
    directory = tmp_path / "model"
    prompts = write_trained(directory, "gemma4_text", 1, True, 3, **GEMMA4_E)
    served = vllm_host.call(partial(serve, directory, prompts, NEW_TOKENS, 3))
    expected, counts = Reference.load(directory, "gemma4_text", 1).simulate(prompts, NEW_TOKENS, 3)
    assert (served.draft, served.token_ids) == ("Gemma4HeadMTPModel", expected)
    found = (served.counts.drafts, served.counts.accepted_per_position)
    assert found == (counts.drafts, counts.accepted_per_position)
    assert counts_of_transformers(directory, prompts, 3) == counts
    assert counts.accepted_per_position[-1] > 0


def test_counts_of_an_assistant(vllm_host, tmp_path, mesh):
    """It reads the keys of the last layers that compute some. vLLM has them in the cache of layers that read them.
    Like published ones, it drafts only tokens of the clusters that it selects."""

    def draft_as(reference: Reference) -> Reference:
        return AssistantReference.of(reference.trunk, **CLUSTERS)

    prompts = write_trained(tmp_path / "model", "gemma4_text", 1, True, 3, draft_as, **GEMMA4_E)
    declare(tmp_path / "model", config_for(settings_of(tmp_path / "model"), **CLUSTERS).to_dict(), SOURCES)
    directory = exported(tmp_path / "model", tmp_path, mesh)
    reference = AssistantReference.load(directory, directory / "draft")
    served = vllm_host.call(partial(serve, directory, prompts, NEW_TOKENS, 3))  # on a CPU, with the plugin
    expected, counts = reference.simulate(prompts, NEW_TOKENS, 3)
    assert (served.draft, served.token_ids) == (DRAFT_CLASS, expected)
    found = (served.counts.drafts, served.counts.accepted_per_position)
    assert found == (counts.drafts, counts.accepted_per_position)
    assert counts_of_transformers(directory, prompts, 3) == counts
    assert counts.accepted_per_position[-1] > 0
    report = vllm_host.call(partial(report_of, directory))
    assert (report.problems, report.draft) == ([], DRAFT_CLASS)
    reference.assistant.masked_embedding.centroid_intermediate_top_k = CLUSTERS["num_centroids"]
    assert reference.simulate(prompts, NEW_TOKENS, 3)[1] != counts  # of all clusters
