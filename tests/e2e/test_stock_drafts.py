"""Test that vLLM without any plugin drafts with the folder `draft/` of an export, and counts what a reference counts."""

import importlib.util
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swiftlite.args.commands import ExportArgs
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from swiftlite.export.run import convert
from swiftlite.families.serving.stock import DRAFTING
from tests.e2e.vllm_here import Served, serve
from tests.engines.reference import Reference, follow, write_trained
from tests.tiers import some_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
NEW_TOKENS = 16
# The heads of published SmolLM3 models have no rotary embeddings, which vLLM's classes always have.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "qwen3": {"head_dim": 128},
    "mistral": {"sliding_window": 6},
    "phi3": {"sliding_window": 6},
    "smollm3": {"no_rope_layers": [0, 1]},
}
CLASSES = {
    **dict.fromkeys(("llama", "mistral", "qwen3", "granite", "phi3", "smollm3"), "HYV3MTP"),
    **dict.fromkeys(("qwen2", "seed_oss"), "MiMoMTP"),
}


@pytest.fixture
def exported(tmp_path, mesh) -> Callable[[str], tuple[Path, Reference, list[list[int]]]]:
    """Return a function that exports a trained tiny model of a family, and returns the directory, a reference and
    prompts."""

    def export(family: str) -> tuple[Path, Reference, list[list[int]]]:
        trained, run, directory = tmp_path / "trained", tmp_path / "run", tmp_path / "hf"
        draft_as = partial(follow, drafting=DRAFTING)
        prompts = write_trained(trained, family, 1, family == "llama", 3, draft_as, **SIZES.get(family, {}))
        config = json.loads((trained / "config.json").read_text())
        (trained / "config.json").write_text(json.dumps(config | {"mtp_drafting": DRAFTING.to_json()}))
        convert(ExportArgs(model=str(trained), output_dir=str(run), to_mcore=True), mesh)
        convert(ExportArgs(model=str(run), output_dir=str(directory), to_hf=True), mesh)
        return directory, draft_as(Reference.load(trained, family, depth=1)), prompts

    return export


def served_without_plugins(directory: Path, prompts: list[list[int]], num_tokens: int) -> tuple[Served, str]:
    """Return the results of vLLM, and the module of the function that selects its draft classes, which the plugin
    replaces."""
    os.environ["VLLM_PLUGINS"] = ""
    served = serve(directory, prompts, NEW_TOKENS, num_tokens)
    from vllm.config.speculative import SpeculativeConfig

    return served, SpeculativeConfig.hf_config_override.__module__


@pytest.mark.parametrize("family", some_of(CLASSES, "llama", "qwen2"))
def test_counts_of_vllm_without_plugins(family, exported, vllm_host):
    directory, reference, prompts = exported(family)
    for num_tokens in (1, 3):
        served, module = vllm_host.call(partial(served_without_plugins, directory, prompts, num_tokens))
        expected, counts = reference.simulate(prompts, NEW_TOKENS, num_tokens)
        assert (module, served.draft) == ("vllm.config.speculative", CLASSES[family])
        assert served.token_ids == expected
        found = served.counts
        assert (found.drafts, found.drafted, found.accepted_per_position) == tuple(vars(counts).values())
        assert 0.1 < counts.accepted_per_position[0] / counts.drafts < 0.9  # some right, some wrong
        assert counts_of_transformers(directory, prompts, num_tokens) == found
    follow(reference, DRAFTING).zeroes_first_embedding = False
    assert reference.simulate(prompts, NEW_TOKENS, 3)[1] != counts


def counts_of_transformers(directory: Path, prompts: list[list[int]], num_tokens: int) -> Any:
    config = EngineConfig(resolve_served(directory), "float32", num_speculative_tokens=num_tokens)
    engine = start_engine("transformers", config)
    engine.generate(prompts, Sampling(NEW_TOKENS))
    return engine.draft_counts()
