"""Test FP8 checkpoints against a short dequantization, with shapes and slices that no block size divides."""

import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file

from swiftlite import families
from swiftlite.base.errors import UserError
from swiftlite.bridge import tensors as files
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.encoding.fp8 import Fp8
from swiftlite.bridge.hf_config import quantization_change, read_config, write_patched
from swiftlite.bridge.tensors import Checkpoint, describe
from tests.bridge.test_transfer import build, load, read_all, refusal, save
from tests.messages import mentions
from tests.model_tensors import tensors_of
from tests.tiny import make_tiny_hf

BLOCK = (48, 40)  # divides none of the tiny models' sizes
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}


def spread(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Repeat each scale over its whole block. Blocks at the end of the matrix are truncated."""
    return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def quantize(
    weight: torch.Tensor, block: tuple[int, int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = [-(-length // n) for length, n in zip(weight.shape, block, strict=True)]
    scale = (torch.rand(blocks) + 0.5).to(dtype)
    return (weight.float() / spread(scale, weight.shape, block)).to(torch.float8_e4m3fn), scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    return weight.float() * spread(scale.float(), weight.shape, block)


def make_fp8(directory: Path, family: str = "glm4_moe", factors: torch.dtype = torch.float32, **options) -> Path:
    """Write a directory in the format of DeepSeek-V3 and of FP8 repositories on the hub: only projections are
    quantized.
    """
    make_tiny_hf(directory, family, dtype=torch.bfloat16, **options)
    quantized = {}
    for key, tensor in load_file(directory / "model.safetensors").items():
        if key.endswith("_proj.weight") and "eh_proj" not in key:
            quantized[key], quantized[f"{key}_scale_inv"] = quantize(tensor, BLOCK, factors)
        else:
            quantized[key] = tensor
    save_file(quantized, directory / "model.safetensors")
    config = read_config(directory) | {"quantization_config": CONFIG}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


def expected(directory: Path) -> dict[str, torch.Tensor]:
    stored = load_file(directory / "model.safetensors")
    return {
        key: dequantize(tensor, stored[f"{key}_scale_inv"], BLOCK).bfloat16()
        if f"{key}_scale_inv" in stored
        else tensor
        for key, tensor in stored.items()
        if not key.endswith("_scale_inv")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "factors"),
    [
        ("glm4_moe", torch.float32),
        ("qwen3", torch.bfloat16),  # as Qwen publishes them
        ("qwen3", torch.float16),
    ],
)
def test_quantized_in_bfloat16_out(tmp_path, mesh, family, factors, dtype):
    source = make_fp8(tmp_path / "in", family, factors, depth=1)
    numbers = expected(source)
    model = build(source, mesh, depth=1, dtype=dtype)
    assert not load(model, source).dropped
    assert not any(tensor.isnan().any() for _, tensor in tensors_of(model))
    save(model, source, tmp_path / "out")
    written = read_all(tmp_path / "out")
    assert written.keys() == numbers.keys()
    for key, tensor in numbers.items():
        assert written[key].dtype is tensor.dtype, key
        assert torch.equal(written[key], tensor), key
    write_patched(source, tmp_path / "out", quantization_change(read_config(source)))
    assert "quantization_config" not in read_config(tmp_path / "out")
    for directory in (source, tmp_path / "out"):
        assert audit_hf(directory, families.get(read_config(directory))) == []


def test_float32_parameters_get_more_than_bfloat16(tmp_path, mesh):
    source = make_fp8(tmp_path, "qwen3")
    load(model := build(source, mesh, depth=0), source)
    stored, key = load_file(source / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    exact = dequantize(stored[key], stored[f"{key}_scale_inv"], BLOCK)
    assert torch.equal(model.get_parameter("decoder.layers.1.mlp.linear_fc2.weight"), exact)
    assert not torch.equal(exact.bfloat16().float(), exact)


def test_description_is_of_the_export(tmp_path):
    source = make_fp8(tmp_path, "qwen3")
    assert {key: (one["dtype"], tuple(one["shape"])) for key, one in describe(source).items()} == {
        key: ("bfloat16", tuple(tensor.shape)) for key, tensor in expected(source).items()
    }


@st.composite
def boxes(draw) -> tuple[tuple[int, int], tuple[int, int], tuple[slice, slice], int]:
    """Draw a shape, a block size, a slice (also empty), and the number of bytes that are read at once."""
    shape = (draw(st.integers(1, 20)), draw(st.integers(1, 20)))
    block = (draw(st.integers(1, 8)), draw(st.integers(1, 8)))
    borders = [sorted((draw(st.integers(0, length)), draw(st.integers(0, length)))) for length in shape]
    return shape, block, (slice(*borders[0]), slice(*borders[1])), draw(st.integers(1, 64))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(box=boxes())
def test_any_slice_of_any_shape(tmp_path, monkeypatch, box):
    shape, block, index, chunk_bytes = box
    monkeypatch.setattr(files, "_CHUNK_BYTES", chunk_bytes)
    weight, scale = quantize(torch.randn(shape), block)
    save_file({"x.weight": weight, "x.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    whole = dequantize(weight, scale, block)
    with Checkpoint(tmp_path, Fp8(block)) as checkpoint:
        assert list(checkpoint.entries) == ["x.weight"]
        target = torch.full(whole[index].shape, -7.0)
        checkpoint.read_into(target, "x.weight", index)
        assert torch.equal(target, whole[index])
        assert torch.equal(checkpoint.read("x.weight"), whole)


def test_blocks_of_the_hub(tmp_path):
    """Blocks are 128 x 128, as in DeepSeek-V3. A matrix [300, 130] has 3 x 2 blocks."""
    weight, scale = quantize(torch.randn(300, 130), (128, 128))
    assert scale.shape == (3, 2)
    save_file({"x.weight": weight, "x.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, Fp8((128, 128))) as checkpoint:
        target = torch.empty(2, 3)
        checkpoint.read_into(target, "x.weight", (slice(127, 129), slice(127, 130)))
    assert torch.equal(target[0, 0], weight[127, 127].float() * scale[0, 0])
    assert torch.equal(target[1, 2], weight[128, 129].float() * scale[1, 1])


KEY = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop(f"{KEY}_scale_inv"), f"{KEY} float8_e4m3fn {KEY}_scale_inv"),
        (lambda t: t.update({f"{KEY}_scale_inv": torch.ones(2, 2)}), f"{KEY}_scale_inv float32 [2, 2]"),
        (
            lambda t: t.update({f"{KEY}_scale_inv": torch.ones(2, 3).to(torch.float8_e4m3fn)}),
            f"{KEY}_scale_inv float8_e4m3fn [2, 3] [48, 40] {KEY} [64, 96]",
        ),
        (lambda t: t.update({KEY: torch.ones(64).to(torch.float8_e4m3fn)}), f"{KEY} [64]"),
    ],
)
def test_factors_that_do_not_fit(tmp_path, mesh, change, problem):
    source = make_fp8(tmp_path, "qwen3")
    stored = load_file(source / "model.safetensors")
    assert stored[f"{KEY}_scale_inv"].shape == (2, 3)
    change(stored)
    save_file(stored, source / "model.safetensors")
    with pytest.raises(UserError) as raised:
        load(build(source, mesh, depth=0), source)
    assert mentions(str(raised.value), problem)
    assert any(mentions(line, problem) for line in audit_hf(source, families.get(read_config(source))))


def test_every_tensor_without_factors_is_named(tmp_path, mesh):
    source = make_fp8(tmp_path, "qwen3")
    stored = load_file(source / "model.safetensors")
    keys = [key for key in stored if key.endswith("down_proj.weight")]
    assert len(keys) == 2
    for key in keys:
        del stored[f"{key}_scale_inv"]
    save_file(stored, source / "model.safetensors")
    assert mentions(refusal(build(source, mesh, depth=0), source), " ".join(f"{key}_scale_inv" for key in keys))


def test_factors_that_the_config_does_not_announce(tmp_path, mesh):
    """Without the scales, the numbers would be wrong."""
    source = make_fp8(tmp_path, "qwen3")
    (source / "config.json").write_text(json.dumps({**read_config(source), "quantization_config": None}))
    assert mentions(refusal(build(source, mesh, depth=0), source), f"{KEY}_scale_inv")
