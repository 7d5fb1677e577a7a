"""Test with SGLang's own loaders that it reads NVFP4, which it computes on GPUs only; a dry load runs no kernel."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from swiftlite.args.commands import ExportArgs
from swiftlite.engines.loading.load_report import LoadReport
from swiftlite.export.run import quantize_model
from tests.stand_ins import sglang_environment
from tests.tiny import make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
# SGLang compares the compute capability of the GPU with that of its kernels before it builds modules.
LOAD_ALL = """
import dataclasses, json, sys
import torch
torch.cuda.get_device_capability = lambda *arguments: (9, 0)
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.sglang.dry_load import dry_load
for directory in sys.argv[1:]:
    report = dry_load(EngineConfig(resolve_served(directory), num_speculative_tokens=None))
    print(json.dumps(dataclasses.asdict(report)))
"""


def test_modules_are_built_as_the_files_have_them(mesh, tmp_path):
    model = make_tiny_hf(tmp_path / "plain", "qwen3", depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    args = ExportArgs(model=str(model), quant_method="nvfp4")
    exports = {heads: str(tmp_path / heads) for heads in ("keep", "block")}
    for heads, output_dir in exports.items():
        quantize_model(dataclasses.replace(args, output_dir=output_dir, quant_heads=heads), mesh)
    command = [sys.executable, "-c", LOAD_ALL, *exports.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=sglang_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    for heads, report in zip(exports, (LoadReport(**line) for line in lines), strict=True):
        assert report.problems == []
        quantized, _, plain = report.draft_modules.partition("plain: ")
        assert ("o_proj" in quantized) is (heads == "block")
        assert ("o_proj" in plain) is (heads == "keep")
        assert "fc" in plain
