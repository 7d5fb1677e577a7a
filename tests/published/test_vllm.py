"""Test every published configuration with vLLM's configuration and loaders, in one process.

Some models receive new weights as a running engine does.
"""

import importlib.util
from typing import Any

import pytest

from tests.engines.dry_loads import dry_loads
from tests.engines.reference import convention
from tests.published import library
from tests.tiers import selected, some_of
from tests.tiny import DSA

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
# vLLM's kernels for MXFP4 do not support every CPU, and vLLM chooses one while it builds the model. It has indexers and
# limits of experts on GPUs only.
ON_GPUS = (*DSA, "step3p5")
LOADED = [model for model in library.MODELS if not library.is_in_mxfp4(model) and library.family(model) not in ON_GPUS]


RELOADED = ["Llama-3.1-8B", "Qwen3.5-27B", "Qwen3.6-35B-A3B"]
"""Models that receive new weights: one has a padded vocabulary, and two have a vision tower that is not transferred."""
IN_VLLM = "tests.engines.vllm.in_vllm"


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory) -> dict[Any, Any]:
    """Return vLLM's report by model, and the result of `reload` by model and "reload"."""
    folder = tmp_path_factory.mktemp("models")
    asked: dict[Any, Any] = {"FP8": (f"{IN_VLLM}:support_fp8",)}
    asked |= {model: library.build(folder / model, model) for model in selected(request, "model")}
    for model in RELOADED:
        asked[model, "reload"] = (f"{IN_VLLM}:reload", str(asked[model]))
    return dry_loads("vllm", asked)


@pytest.mark.parametrize("model", some_of(LOADED, *(model for model in LOADED if model in library.CHOSEN)))
def test_vllm_loads_it_whole(reports, model):
    report, family = reports[model], library.family(model)
    assert report.problems == []
    assert report.notes == []
    depth = int(family in library.HEADS)
    assert (report.num_mtp_heads, report.num_drafting) == (depth, depth)
    assert report.draft == (convention("vllm", family).draft if depth else None)


@pytest.mark.parametrize("model", RELOADED)
def test_live_weights_fill_all_that_is_trained(reports, model):
    found = reports[model, "reload"]
    assert found["problems"] == ""
    assert found["changed"] == []
    has_tower = any(name.startswith("visual.") for name in found["parameters"])
    assert has_tower is model.startswith("Qwen3.")
