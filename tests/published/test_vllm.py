"""Test every published configuration with vLLM's configuration and loaders, in one process.

Some models receive new weights as a running engine does.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swiftlite.engines.loading.load_report import LoadReport
from tests.engines.dry_loads import dry_loads
from tests.engines.reference import convention
from tests.published import library
from tests.stand_ins import torchvision_environment
from tests.tiny import DSA

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
# vLLM's kernels for FP8 on a CPU need AMX. Which kernel multiplies is not in question here: none does.
WITH_FP8 = """
from vllm.model_executor.kernels.linear.scaled_mm import cpu
for kernel in vars(cpu).values():
    if getattr(kernel, "__module__", "") == cpu.__name__ and "is_supported" in vars(kernel):
        kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
"""

# vLLM's kernels for MXFP4 do not support every CPU, and vLLM chooses one while it builds the model. It has indexers and
# limits of experts on GPUs only.
ON_GPUS = (*DSA, "step3p5")
LOADED = [model for model in library.MODELS if not library.is_in_mxfp4(model) and library.family(model) not in ON_GPUS]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, LoadReport]:
    folder = tmp_path_factory.mktemp("published")
    directories = {model: library.build(folder / model, model) for model in LOADED}
    return dry_loads("vllm", directories, prepare=WITH_FP8)


@pytest.mark.parametrize("model", LOADED)
def test_vllm_loads_it_whole(reports, model):
    report, family = reports[model], library.family(model)
    assert report.problems == []
    assert report.notes == []
    depth = int(family in library.HEADS)
    assert (report.num_mtp_heads, report.num_drafting) == (depth, depth)
    assert report.draft == (convention("vllm", family).draft if depth else None)


RELOADED = ["Llama-3.1-8B", "Qwen3.5-27B", "Qwen3.6-35B-A3B"]
"""Models that receive new weights: one has a padded vocabulary, and two have a vision tower that is not transferred."""


@pytest.fixture(scope="module")
def reloads(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reloaded")
    directories = [str(library.build(folder / model, model)) for model in RELOADED]
    script = Path(__file__).parents[1] / "engines" / "vllm" / "reload.py"
    command = [sys.executable, "-W", "ignore", str(script), *directories]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=torchvision_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"problems"')]
    return dict(zip(RELOADED, lines, strict=True))


@pytest.mark.parametrize("model", RELOADED)
def test_live_weights_fill_all_that_is_trained(reloads, model):
    found = reloads[model]
    assert found["problems"] == ""
    assert found["changed"] == []
    has_tower = any(name.startswith("visual.") for name in found["parameters"])
    assert has_tower is model.startswith("Qwen3.")
