"""Compare the numbers of ModelOpt's checkpoints with those that ModelOpt itself decodes, where it is installed.

pip install nvidia-modelopt
"""

import importlib.util
import subprocess
import sys

import pytest
import torch

from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.tensors import Checkpoint
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="ModelOpt is not installed")
CONFIGS = {
    "FP8_DEFAULT_CFG": "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": "FP8_PER_CHANNEL_PER_TOKEN",
    "MXFP8_DEFAULT_CFG": "MXFP8",
    "NVFP4_DEFAULT_CFG": "NVFP4",
}


@pytest.mark.parametrize("config", CONFIGS)
def test_numbers_are_those_of_modelopt(tmp_path, config):
    source = make_tiny_hf(tmp_path / "source", "qwen3", dtype=torch.bfloat16)
    out = tmp_path / "quantized"
    command = [sys.executable, "-m", "tests.bridge.modelopt_reference", str(source), str(out), config]
    subprocess.run(command, check=True)
    hf_config = read_config(out)
    assert hf_config["quantization_config"]["quant_algo"] == CONFIGS[config]
    expected = torch.load(out / "decoded.pt", weights_only=True)
    assert len(expected) >= 14
    with Checkpoint(out, format_of(hf_config)) as checkpoint:
        for key, matrix in expected.items():
            torch.testing.assert_close(checkpoint.read(key, torch.float32), matrix, rtol=0, atol=0)
