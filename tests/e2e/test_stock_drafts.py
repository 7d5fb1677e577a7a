"""Test that vLLM without plugins drafts from the folder `draft/` of an export, and counts what a reference counts."""

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.loading.load_report import LoadReport
from swiftlite.engines.served_model import resolve_served
from swiftlite.families.serving.stock import DRAFTING
from tests.e2e.vllm_here import Served, serve
from tests.engines.reference import Counts, Reference, follow, write_trained
from tests.messages import mention_each
from tests.stock_exports import CLASSES, SIZES, export_for_stock
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
NEW_TOKENS = 16


def without_plugins(function: Callable[..., Any], *arguments: Any) -> Any:
    os.environ["VLLM_PLUGINS"] = ""
    return function(*arguments)


def served_without_plugins(directory: Path, prompts: list[list[int]], num_tokens: int) -> tuple[Served, str]:
    """Return the results of vLLM, and the module of the function that selects its draft classes, which the plugin
    replaces."""
    served = without_plugins(serve, directory, prompts, NEW_TOKENS, num_tokens)
    from vllm.config.speculative import SpeculativeConfig

    return served, SpeculativeConfig.hf_config_override.__module__


def counts_of_transformers(directory: Path, prompts: list[list[int]], num_tokens: int) -> Counts:
    config = EngineConfig(resolve_served(directory), "float32", num_speculative_tokens=num_tokens)
    engine = start_engine("transformers", config)
    engine.generate(prompts, Sampling(NEW_TOKENS))
    counts = engine.draft_counts()
    return Counts(counts.drafts, counts.drafted, counts.accepted_per_position)


def check_counts(
    vllm_host,
    reference: Reference,
    directory: Path,
    prompts: list[list[int]],
    num_tokens: int,
    draft: str,
    *,
    has_plugin: bool = False,
) -> Counts:
    """Check that vLLM and the transformers engine draft as a reference, and return the counts.

    Args:
        directory: an export of the reference with `draft/`.
        draft: end of the name of vLLM's draft class.
        has_plugin: whether vLLM has the plugins.
    """
    if has_plugin:
        served = vllm_host.call(partial(serve, directory, prompts, NEW_TOKENS, num_tokens))
    else:
        served, module = vllm_host.call(partial(served_without_plugins, directory, prompts, num_tokens))
        assert module == "vllm.config.speculative"
    expected, counts = reference.simulate(prompts, NEW_TOKENS, num_tokens)
    assert served.draft.endswith(draft)
    assert served.token_ids == expected
    found = Counts(served.counts.drafts, served.counts.drafted, served.counts.accepted_per_position)
    assert found == counts
    assert found == counts_of_transformers(directory, prompts, num_tokens)
    assert 0.1 < counts.accepted_per_position[0] / counts.drafts < 0.9  # some right, some wrong
    assert counts.accepted_per_position[-1] > 0
    return counts


# The first of three drafts is that of requests with a single draft.
@pytest.mark.parametrize(("family", "num_tokens"), some_of(product(CLASSES, (1, 3)), ("qwen2", 3)))
def test_counts_of_vllm_without_plugins(family, num_tokens, vllm_host, tmp_path, mesh):
    draft_as = partial(follow, drafting=DRAFTING)
    prompts = write_trained(tmp_path / "model", family, 1, family == "llama", 3, draft_as, **SIZES.get(family, {}))
    reference = draft_as(Reference.load(tmp_path / "model", family, depth=1))
    directory = export_for_stock(tmp_path / "model", tmp_path, mesh)
    counts = check_counts(vllm_host, reference, directory, prompts, num_tokens, CLASSES[family])
    reference.zeroes_first_embedding = False
    assert reference.simulate(prompts, NEW_TOKENS, num_tokens)[1] != counts


def report_of(directory: Path) -> LoadReport:
    from swiftlite.engines.vllm.dry_load import dry_load

    return dry_load(EngineConfig(resolve_served(directory), num_speculative_tokens=None))


@pytest.mark.parametrize("family", some_of(CLASSES, "llama", "qwen2"))
def test_doctor_loads_trunk_and_folder_without_plugins(family, vllm_host, tmp_path, mesh):
    source = make_tiny_hf(tmp_path / "model", family, 1, **SIZES.get(family, {}))
    directory = export_for_stock(source, tmp_path, mesh)
    report = vllm_host.call(partial(report_of, directory))
    assert (report.problems, report.notes, report.draft) == ([], [], CLASSES[family])
    file = directory / "draft" / "model.safetensors"
    tensors = load_file(file)
    lost = next(key for key in tensors if "input_layernorm" in key)
    del tensors[lost]
    save_file(tensors, file, {"format": "pt"})
    report = vllm_host.call(partial(report_of, directory))
    assert mention_each(report.problems, [f"draft/ model.safetensors {lost}", f"{CLASSES[family]} 64"])


class HostWithoutPlugins:
    """A `Host` whose processes have no plugins of vLLM."""

    def __init__(self, host: Any):
        self._host = host

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._host.call(without_plugins, function, *arguments)
