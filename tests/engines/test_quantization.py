"""Test the description of a quantized model, for all formats."""

import pytest

from swiftlite.engines.quantization import quantization_of, quantization_words
from swiftlite.families.resolved import resolve
from tests.messages import mentions
from tests.quantized import BLOCK, FORMATS, GROUP, quantize_hf
from tests.tiny import make_tiny_hf

WEIGHTS = {
    "int8": {"bits": 8},
    "fp8": {"bits": 8},
    "fp8_tensor": {"bits": 8},
    "fp8_blocks": {"bits": 8, "block": list(BLOCK)},
    "fp8_blocks_bf16": {"bits": 8, "block": list(BLOCK)},
    "fp8_blocks_128": {"bits": 8, "block": [128, 128]},
    "nvfp4": {"bits": 4, "group_size": 16},
    "modelopt_fp8": {"bits": 8},
    "modelopt_nvfp4": {"bits": 4, "group_size": 16},
}
"""Formats that are not listed have 4 bits and groups of `GROUP`."""


@pytest.mark.parametrize("name", FORMATS)
def test_bits_and_groups_are_those_of_the_format(tmp_path, name):
    source = make_tiny_hf(tmp_path / "source", "qwen3", depth=1, hidden_size=128, intermediate_size=128)
    found = quantization_of(resolve(quantize_hf(source, tmp_path / "quantized", name, block=False)))
    assert found["weights"] == [WEIGHTS.get(name, {"bits": 4, "group_size": GROUP})]
    assert found["format"].startswith(FORMATS[name].config["quant_method"])
    bits = found["weights"][0]["bits"]
    is_rounded = bits == 8 or name.startswith("modelopt")
    assert found.get("activation_bits") == (bits if is_rounded else None)
    assert found["heads"] == "keep"


def test_heads_are_kept_or_quantized(tmp_path):
    source = make_tiny_hf(tmp_path / "source", "qwen3", depth=1)
    both = [quantize_hf(source, tmp_path / str(block), "int8", block=block) for block in (False, True)]
    kept, quantized = (quantization_of(resolve(directory)) for directory in both)
    assert (kept["heads"], quantized["heads"]) == ("keep", "block")
    assert "not quantized" in quantization_words(kept)
    assert "not quantized" not in quantization_words(quantized)
    bare = quantize_hf(make_tiny_hf(tmp_path / "bare", "qwen3"), tmp_path / "bare8", "int8", block=False)
    assert "heads" not in quantization_of(resolve(bare))


def test_a_plain_model_has_no_quantization(tmp_path):
    assert quantization_of(resolve(make_tiny_hf(tmp_path / "source", "qwen3", depth=1))) == {}
    assert quantization_words({}) == ""


def test_words():
    described = {"method": "rtn", "format": "compressed-tensors", "weights": [{"bits": 4, "group_size": 64}]}
    assert mentions(quantization_words(described), "rtn compressed-tensors 4 64")
    mixed = {"format": "fp8", "weights": [{"bits": 8, "block": [128, 96]}, {"bits": 4}], "activation_bits": 7}
    assert mentions(quantization_words(mixed), "fp8 8 128 96 4 7")
