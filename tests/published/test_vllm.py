"""Every published configuration through vLLM's own configuration and loaders; one process of vLLM's loads them all."""

import importlib.util
import json
import subprocess
import sys

import pytest

from swiftlite.engines.load_report import LoadReport
from tests.engines.reference import convention
from tests.published import library
from tests.stand_ins import torchvision_environment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
# vLLM's kernels for FP8 on a CPU need AMX. Which kernel multiplies is not in question here: none does.
LOAD_ALL = """
import dataclasses, json, sys
from pathlib import Path
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.vllm.dry_load import dry_load
from vllm.model_executor.kernels.linear.scaled_mm import cpu
for kernel in vars(cpu).values():
    if getattr(kernel, "__module__", "") == cpu.__name__ and "is_supported" in vars(kernel):
        kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
for directory in sys.argv[1:]:
    print(json.dumps(dataclasses.asdict(dry_load(EngineConfig(Path(directory), num_speculative_tokens=None)))))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, LoadReport]:
    folder = tmp_path_factory.mktemp("published")
    directories = [str(library.build(folder / model, model)) for model in library.MODELS]
    command = [sys.executable, "-c", LOAD_ALL, *directories]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=torchvision_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    return {model: LoadReport(**line) for model, line in zip(library.MODELS, lines, strict=True)}


@pytest.mark.parametrize("model", library.MODELS)
def test_vllm_loads_it_whole(reports, model):
    report, family = reports[model], library.family(model)
    assert report.problems == []
    assert report.notes == []
    depth = int(family in library.HEADS)
    assert (report.num_mtp_heads, report.num_drafting) == (depth, depth)
    assert report.draft == (convention("vllm", family).draft if depth else None)
