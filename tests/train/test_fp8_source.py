"""Test runs of FP8 models: exports in the layout of the model keep the codes of everything that did not change."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.hf_config import read_config
from swiftlite.families.resolved import resolve
from tests.messages import naming
from tests.tiny import make_tiny_hf
from tests.train.test_quantized_trunk import HEADS, NEW, decoded, export, split_by_mtp, stored
from tests.train.test_sft import train

quantized = pytest.importorskip("tests.quantized", exc_type=ImportError)

BLOCK = quantized.BLOCK[0]
FP8: dict[str, Any] = {"quant_method": "fp8", "quant_block": BLOCK}
LORA: dict[str, Any] = {"tuner_type": "lora", "target_modules": ["q_proj"], "lora_rank": 4, "train_iters": 2}
FULL: dict[str, Any] = {"torch_dtype": "bfloat16", "train_iters": 1}
SCALE = "_scale_inv"


def make(tmp_path: Path, name: str, family: str, depth: int) -> Path:
    """Write an FP8 model whose heads, if any, are quantized as well."""
    plain = make_tiny_hf(tmp_path / "plain", family, depth=depth, dtype=torch.bfloat16, with_tokenizer=True)
    return quantized.quantize_hf(plain, tmp_path / "model", name, block=True)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def is_within_half_a_step(codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether codes are the nearest to a weight. Numbers of float8_e4m3fn have 3 bits after the first, and none
    is below 2^-9."""
    rows, columns = weight.shape
    scale = scales.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    exact = weight.double() / scale.double()
    step = torch.exp2(exact.abs().clamp(min=2**-6).log2().floor() - 3)
    # The quotient is rounded to float32 before it is rounded to a code.
    return bool(((codes.double() - exact).abs() <= step / 2 + exact.abs() * 2**-24).all())


def check(model: Path, hf: Path, trained: dict[str, torch.Tensor]) -> tuple[set[str], set[str]]:
    """Check each tensor of an export: kept bytes, or the trained numbers within half a step.

    Args:
        trained: the numbers of the run.

    Returns:
        The quantized matrices that were kept, and those that changed.
    """
    before, after, numbers = stored(model), stored(hf), decoded(model)
    assert after.keys() == before.keys()
    assert {key: (one.dtype, one.shape) for key, one in after.items()} == {
        key: (one.dtype, one.shape) for key, one in before.items()
    }
    kept, changed = set(), set()
    for key, number in trained.items():
        is_quantized = key + SCALE in before
        if not is_quantized:
            assert same_bits(after[key], number), key
        elif torch.equal(numbers[key], number):
            kept.add(key)
            assert same_bits(after[key], before[key]), key
            assert same_bits(after[key + SCALE], before[key + SCALE]), key
        else:
            changed.add(key)
            assert is_within_half_a_step(after[key], after[key + SCALE], number), key
    assert audit_hf(hf, resolve(hf).family) == []
    return kept, changed


@pytest.mark.parametrize(
    ("family", "name", "run_options"),
    [
        ("qwen3", "fp8_blocks_bf16", LORA),
        pytest.param("glm4_moe", "fp8_blocks", FULL, marks=pytest.mark.slow),
        ("deepseek_v3", "fp8_blocks", HEADS),
    ],
    ids=["some projections", "everything", "heads"],
)
def test_what_did_not_change_keeps_its_codes(options, mesh, tmp_path, family, name, run_options):
    model = make(tmp_path, name, family, depth=1)
    run = train(options(model=str(model), **run_options), mesh)
    dequantize = {"dequantize": True} if run_options is HEADS else {}
    trained = stored(export(run, mesh, **dequantize).rename(tmp_path / "trained"))
    assert "quantization_config" not in read_config(tmp_path / "trained")
    hf = export(run, mesh, **FP8, **dequantize)
    kept, changed = check(model, hf, trained)
    heads = split_by_mtp(model, trained)[1].keys()
    if run_options is LORA:
        assert changed == {key for key in kept | changed if "q_proj" in key}
    elif run_options is HEADS:
        assert changed
        assert changed <= heads
    else:
        assert len(changed) > len(kept)
        assert heads & changed
    assert read_config(hf)["quantization_config"] == read_config(model)["quantization_config"]
    assert hf.joinpath("config.json").read_bytes() != tmp_path.joinpath("trained", "config.json").read_bytes()


def test_a_run_that_changes_nothing_changes_no_byte(options, mesh, tmp_path):
    """All parameters are trained, but 16 bits cannot represent a change of this size."""
    model = make(tmp_path, "fp8_blocks", "qwen3", depth=1)
    run = train(options(model=str(model), lr=1e-30, **FULL), mesh)
    hf = export(run, mesh, **FP8)
    before, after = stored(model), stored(hf)
    assert after.keys() == before.keys()
    assert all(same_bits(after[key], before[key]) for key in before)
    assert read_config(hf) == read_config(model)


@pytest.mark.slow
def test_scales_of_powers_of_two(options, mesh, tmp_path):
    model = make(tmp_path, "fp8_blocks", "qwen3", depth=1)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (model / "config.json").write_text(json.dumps(config))
    run = train(options(model=str(model), **FULL), mesh)
    trained = stored(export(run, mesh).rename(tmp_path / "trained"))
    hf = export(run, mesh, **FP8)
    _, changed = check(model, hf, trained)
    assert changed
    for key in changed:
        mantissa, _ = torch.frexp(stored(hf)[key + SCALE])
        assert bool((mantissa == 0.5).all())


def test_new_heads_are_plain(options, mesh, tmp_path):
    """They are listed, and the trunk keeps its codes."""
    model = make(tmp_path, "fp8_blocks_bf16", "qwen3", depth=0)
    run = train(options(model=str(model), **NEW), mesh)
    hf = export(run, mesh, **FP8, dequantize=True)
    trunk, heads = split_by_mtp(hf, stored(hf))
    before = stored(model)
    assert trunk.keys() == before.keys()
    assert all(same_bits(trunk[key], before[key]) for key in before)
    assert all(tensor.dtype is torch.bfloat16 for tensor in heads.values())
    assert "mtp.fc" in " ".join(read_config(hf)["quantization_config"]["modules_to_not_convert"])
    assert audit_hf(hf, resolve(hf).family) == []


@pytest.mark.slow
def test_quantized_heads_can_be_written_plain(options, mesh, tmp_path):
    model = make(tmp_path, "fp8_blocks", "qwen3", depth=1)
    run = train(options(model=str(model), **FULL), mesh)
    hf = export(run, mesh, **FP8, quant_heads="keep")
    trunk, heads = split_by_mtp(hf, stored(hf))
    assert all(tensor.dtype is torch.bfloat16 for tensor in heads.values())
    assert any(tensor.dtype is torch.float8_e4m3fn for tensor in trunk.values())
    assert audit_hf(hf, resolve(hf).family) == []


@pytest.mark.slow
def test_other_blocks_are_a_new_layout(options, mesh, tmp_path):
    model = make(tmp_path, "fp8_blocks_bf16", "qwen3", depth=1)
    run = train(options(model=str(model), lr=1e-30, **FULL), mesh)
    hf = export(run, mesh, quant_method="fp8", quant_block=16)
    assert read_config(hf)["quantization_config"]["weight_block_size"] == [16, 16]
    assert stored(hf)["model.layers.0.mlp.up_proj.weight_scale_inv"].dtype is torch.float32


@pytest.mark.slow
def test_plain_heads_of_the_model_are_not_quantized(options, mesh, tmp_path):
    plain = make_tiny_hf(tmp_path / "plain", "qwen3", depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    model = quantized.quantize_hf(plain, tmp_path / "model", "fp8_blocks", block=False)
    run = train(options(model=str(model), **FULL), mesh)
    named = "mtp.layers.0.self_attn.q_proj quantization_config.modules_to_not_convert"
    with pytest.raises(UserError, match=naming(named)) as error:
        export(run, mesh, **FP8, quant_heads="block")
    assert "--quant_heads keep" in error.value.hint
    assert not run.with_name("run-hf").exists()


def test_a_kept_trunk_is_not_quantized_again(options, mesh, tmp_path):
    model = make(tmp_path, "fp8_blocks", "qwen3", depth=0)
    run = train(options(model=str(model), **NEW), mesh)
    with pytest.raises(UserError, match=naming("--quant_method fp8 --dequantize")):
        export(run, mesh, **FP8)
