"""Test the reference quantization of the tests (`quantized.py`)."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.quantized import FORMATS, dequantize_hf, quantize_hf
from tests.tiny import make_tiny_hf

IDS = torch.tensor([[3, 17, 5, 88]])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_reference_is_half_a_step_from_the_source(name):
    scheme = FORMATS[name]
    weight = torch.randn(64, 96)
    restored = scheme.decompress(scheme.compress(weight)).float()
    largest = weight.abs().amax(1, keepdim=True)
    # Half a step, relative to the largest weight that shares the scale: codes from -7 to 7 or -127 to 127 and, in
    # float8_e4m3fn, 3 bits after the leading one. The largest numbers of FP4 are 4 and 6, and its scales in
    # float8_e4m3fn add at most 1/16; scales in bfloat16 or float16 add at most 1/256.
    half_step = {"int8": 0.5 / 127}.get(name, 0.5 / 7)
    if name.endswith("nvfp4"):
        half_step = 1 / 6 + 1 / 16
    if name in ("fp8_tensor", "modelopt_fp8") or name.startswith("fp8_blocks"):
        largest = weight.abs().amax()
    assert ((restored - weight).abs() <= (half_step + 1 / 256) * largest).all()
    assert not torch.equal(restored, weight)


@pytest.mark.parametrize("name", ["int8", "int4", "int4_asym", "fp8", "fp8_tensor", "nvfp4"])
def test_transformers_reads_the_same_weights(tmp_path, name):
    source = make_tiny_hf(tmp_path / "source", "qwen3", dtype=torch.bfloat16)
    quantized = quantize_hf(source, tmp_path / "quantized", name, block=True)
    reference = dequantize_hf(source, tmp_path / "reference", name, block=True)
    model = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.bfloat16)
    model(IDS)  # weights are dequantized in the first forward pass
    found = model.state_dict()
    expected = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.bfloat16).state_dict()
    assert {key: found[key] for key in expected if not torch.equal(found[key], expected[key])} == {}
