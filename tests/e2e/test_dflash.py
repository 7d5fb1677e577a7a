"""Test that vLLM drafts with exported DFlash and DSpark drafters, and counts what a reference counts: without plugins,
except for DSpark on a CPU."""

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swiftlite.families.eagle3 import VLLM_TRUNKS
from tests.e2e.test_eagle3 import FEATURES, exported, sizes_of
from tests.e2e.test_stock_drafts import (
    NEW_TOKENS,
    check_counts,
    counts_of_transformers,
    report_of,
    served_without_plugins,
)
from tests.e2e.vllm_here import serve
from tests.engines.dflash_reference import DFlashReference, declare
from tests.engines.reference import Counts, Reference, write_trained
from tests.tiers import some_of

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
DRAFT_CLASS = "DFlashQwen3ForCausalLM"
RANK = 8
"""Rank of a DSpark drafter's Markov head."""


def write_drafted(directory: Path, family: str, layers: int, rank: int = 0) -> list[list[int]]:
    """Write a model whose drafts are often correct, and return prompts."""

    def draft_as(reference: Reference) -> Reference:
        return DFlashReference.of(reference.trunk, family, FEATURES, layers, rank)

    prompts = write_trained(directory, family, 1, family == "llama", 3, draft_as, **sizes_of(family))
    declare(directory, FEATURES, layers, rank)
    return prompts


TRUNKS = [family for family in VLLM_TRUNKS if family != "granite"]  # whose embeddings have a factor
# With one layer, tiny drafters of mistral, phi3 and smollm3 do not learn three drafts.
CASES: list[Any] = [(family, 2, 3) for family in TRUNKS] + [("llama", 1, 1), ("qwen3", 1, 2)]


@pytest.mark.engine
@needs_vllm
@pytest.mark.parametrize(("family", "layers", "num_tokens"), some_of(CASES, ("llama", 2, 3)))
def test_counts_of_vllm_without_plugins(family, layers, num_tokens, vllm_host, tmp_path, mesh):
    prompts = write_drafted(tmp_path / "model", family, layers)
    reference = DFlashReference.load(tmp_path / "model", family)
    directory = exported(tmp_path / "model", tmp_path, mesh)
    counts = check_counts(vllm_host, reference, directory, prompts, num_tokens, DRAFT_CLASS)
    report = vllm_host.call(partial(report_of, directory))
    assert (report.problems, report.notes, report.draft) == ([], [], DRAFT_CLASS)
    reference.features = [0, 1, 2]  # off by one
    assert reference.simulate(prompts, NEW_TOKENS, num_tokens)[1] != counts


@pytest.mark.engine
@pytest.mark.slow
@needs_vllm
def test_a_draft_vocabulary(vllm_host, tmp_path, mesh):
    prompts = write_drafted(tmp_path / "model", "llama", 1)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"mtp_draft_vocab": "0-59 70-127"}))
    reference = DFlashReference.load(tmp_path / "model", "llama")
    reference.draft_vocab = [*range(60), *range(70, 128)]
    directory = exported(tmp_path / "model", tmp_path, mesh)
    served, _ = vllm_host.call(partial(served_without_plugins, directory, prompts, 3))
    _, counts = reference.simulate(prompts, NEW_TOKENS, 3)
    found = Counts(served.counts.drafts, served.counts.drafted, served.counts.accepted_per_position)
    assert found == counts == counts_of_transformers(directory, prompts, 3)
    assert vllm_host.call(partial(report_of, directory)).problems == []
    reference.draft_vocab = []
    assert reference.simulate(prompts, NEW_TOKENS, 3)[1] != counts


@pytest.mark.engine
@needs_vllm
@pytest.mark.parametrize(
    ("family", "layers", "num_tokens"), some_of([("llama", 2, 3), ("qwen3", 1, 1)], ("llama", 2, 3))
)
def test_counts_of_dspark(family, layers, num_tokens, vllm_host, tmp_path, mesh):
    prompts = write_drafted(tmp_path / "model", family, layers, RANK)
    reference = DFlashReference.load(tmp_path / "model", family)
    directory = exported(tmp_path / "model", tmp_path, mesh)
    served = vllm_host.call(partial(serve, directory, prompts, NEW_TOKENS, num_tokens))
    expected, counts = reference.simulate(prompts, NEW_TOKENS, num_tokens)
    assert (served.draft, served.token_ids) == ("Qwen3DSparkForCausalLM", expected)
    found = Counts(served.counts.drafts, served.counts.drafted, served.counts.accepted_per_position)
    assert found == counts == counts_of_transformers(directory, prompts, num_tokens)
    assert counts.accepted_per_position[-1] > 0
    report = vllm_host.call(partial(report_of, directory))
    assert (report.problems, report.notes, report.draft) == ([], [], "Qwen3DSparkForCausalLM")
    reference.own["markov_head/markov_w2/weight"].data.zero_()
    assert reference.simulate(prompts, NEW_TOKENS, num_tokens)[1] != counts


@pytest.mark.engine
@pytest.mark.slow
@needs_vllm
def test_dspark_with_a_draft_vocabulary(vllm_host, tmp_path, mesh):
    prompts = write_drafted(tmp_path / "model", "llama", 1, RANK)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"mtp_draft_vocab": "0-59 70-127"}))
    reference = DFlashReference.load(tmp_path / "model", "llama")
    reference.draft_vocab = [*range(60), *range(70, 128)]
    directory = exported(tmp_path / "model", tmp_path, mesh)
    served = vllm_host.call(partial(serve, directory, prompts, NEW_TOKENS, 3))
    _, counts = reference.simulate(prompts, NEW_TOKENS, 3)
    found = Counts(served.counts.drafts, served.counts.drafted, served.counts.accepted_per_position)
    assert found == counts == counts_of_transformers(directory, prompts, 3)
    assert vllm_host.call(partial(report_of, directory)).problems == []
