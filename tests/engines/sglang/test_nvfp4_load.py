"""Test with SGLang's own loaders that it reads NVFP4, which it computes on GPUs only; a dry load runs no kernel."""

import dataclasses
import importlib.util

import pytest
import torch

from swiftlite.args.commands import ExportArgs
from swiftlite.export.run import convert
from tests.engines.dry_loads import dry_loads
from tests.tiny import make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
# SGLang compares the compute capability of the GPU with that of its kernels before it builds modules.
OF_A_GPU = """
import torch
torch.cuda.get_device_capability = lambda *arguments: (9, 0)
"""


def test_modules_are_built_as_the_files_have_them(mesh, tmp_path):
    model = make_tiny_hf(tmp_path / "plain", "qwen3", depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    args = ExportArgs(model=str(model), quant_method="nvfp4")
    exports = {heads: tmp_path / heads for heads in ("keep", "block")}
    for heads, output_dir in exports.items():
        convert(dataclasses.replace(args, output_dir=str(output_dir), quant_heads=heads), mesh)
    for heads, report in dry_loads("sglang", exports, prepare=OF_A_GPU).items():
        assert report.problems == []
        quantized, _, plain = report.draft_modules.partition("plain: ")
        assert ("o_proj" in quantized) is (heads == "block")
        assert ("o_proj" in plain) is (heads == "keep")
        assert "fc" in plain
