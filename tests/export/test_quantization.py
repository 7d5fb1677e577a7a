"""Test `export --quant_method`: the result against the library of the format, all families, failures, ranks."""

import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swiftlite.args.commands import ExportArgs
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.hf_config import read_config
from swiftlite.errors import UserError
from swiftlite.export.run import quantize_model, to_hf, to_mcore
from swiftlite.families import FAMILIES
from swiftlite.families.resolved import resolve
from tests.messages import naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

quantized = pytest.importorskip("tests.quantized", exc_type=ImportError)

METHODS: dict[str, dict[str, Any]] = {
    "int8": {"quant_method": "rtn"},
    "int4": {"quant_method": "rtn", "quant_bits": 4, "group_size": quantized.GROUP},
    "fp8": {"quant_method": "fp8"},
    "fp8_blocks": {"quant_method": "fp8", "quant_block": quantized.BLOCK[0]},
}
"""Options by the format's name in `tests.quantized`."""


def run(model: Path, mesh, output: Path, **options: Any) -> Path:
    quantize_model(ExportArgs(model=str(model), output_dir=str(output), **options), mesh)
    return output


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in directory.glob("*.safetensors") for key, tensor in load_file(file).items()}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype is tensor.dtype, key
        assert torch.equal(found[key].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), key


@pytest.mark.parametrize("heads", ["keep", "block"])
@pytest.mark.parametrize("name", METHODS)
def test_result_is_that_of_the_library(mesh, tmp_path, name, heads):
    """In float32, codes and scales have the bits that the library of the format computes."""
    model = make_tiny_hf(tmp_path / "plain", "qwen3", depth=1, dtype=torch.float32, with_tokenizer=True)
    expected = quantized.quantize_hf(model, tmp_path / "expected", name, block=heads == "block")
    found = run(model, mesh, tmp_path / "out", quant_heads=heads, **METHODS[name])
    assert_same_bits(stored(found), stored(expected))
    left, right = (read_config(directory)["quantization_config"] for directory in (found, expected))
    assert left["quant_method"] == right["quant_method"]
    if "config_groups" in right:
        (group,), (other,) = left["config_groups"].values(), right["config_groups"].values()
        for part in ("weights", "input_activations"):
            assert (group[part] or {}).items() <= (other[part] or {}).items()


@pytest.mark.parametrize(
    ("family", "name"),
    some_of(
        product(FAMILIES, METHODS),
        *((family, "int8") for family in FAMILIES),
        ("qwen3_moe", "int4"),
        ("deepseek_v3", "fp8_blocks"),
        ("qwen3_5", "fp8"),
    ),
)
def test_every_family(mesh, tmp_path, family, name):
    model = make_tiny_hf(tmp_path / "plain", family, depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    options = METHODS[name]
    if name == "int4":
        options = options | {"group_size": 8}  # divides the sizes of all tiny models
    if name == "fp8_blocks":
        options = options | {"quant_block": 8}
    out = run(model, mesh, tmp_path / "out", **options)
    assert audit_hf(out, resolve(out).family) == []
    plain, written = stored(model), stored(out)
    trunk, heads = quantized.linear_modules(model, plain)
    for module in heads:
        assert torch.equal(written[f"{module}.weight"], plain[f"{module}.weight"])
    assert not any(f"{module}.weight" in written and written[f"{module}.weight"].itemsize > 1 for module in trunk)
    for path in model.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            assert (out / path.name).read_bytes() == path.read_bytes()


def test_a_run_is_quantized(mesh, tmp_path):
    """The result is that of quantizing the export; the unquantized export is removed."""
    model = make_tiny_hf(tmp_path / "plain", "qwen3", depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    to_mcore(ExportArgs(model=str(model), output_dir=str(tmp_path / "run"), to_mcore=True), mesh)
    options = {"model": str(tmp_path / "run"), "output_dir": str(tmp_path / "out"), "to_hf": True}
    to_hf(ExportArgs(**options, **METHODS["int8"]), mesh)
    assert_same_bits(stored(tmp_path / "out"), stored(run(model, mesh, tmp_path / "direct", **METHODS["int8"])))
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "run", "out", "direct"}


def test_heads_can_be_quantized_in_files_of_several_shards(mesh, tmp_path):
    model = make_tiny_hf(tmp_path / "plain", "glm4_moe", depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    out = run(model, mesh, tmp_path / "out", quant_heads="block", max_shard_size_gb=3e-5, **METHODS["int8"])
    assert len(list(out.glob("*.safetensors"))) > 2
    _, heads = quantized.linear_modules(model, stored(model))
    assert all(stored(out)[f"{module}.weight"].dtype is torch.int8 for module in heads)
    assert audit_hf(out, resolve(out).family) == []


def test_a_quantized_model_is_not_quantized_again(mesh, tmp_path):
    model = make_tiny_hf(tmp_path / "plain", "qwen3", dtype=torch.bfloat16, with_tokenizer=True)
    once = run(model, mesh, tmp_path / "once", **METHODS["int8"])
    with pytest.raises(UserError, match=naming("already quantized")):
        run(once, mesh, tmp_path / "twice", **METHODS["fp8"])
    assert not (tmp_path / "twice").exists()


def test_groups_that_do_not_fit_are_named(mesh, tmp_path):
    model = make_tiny_hf(tmp_path / "plain", "qwen3", dtype=torch.bfloat16, with_tokenizer=True)
    with pytest.raises(UserError, match=naming("--group_size 48 model.layers.0.mlp.gate_proj.weight")) as error:
        run(model, mesh, tmp_path / "out", quant_method="rtn", quant_bits=4, group_size=48)
    assert "--group_size" in error.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_killed_export_leaves_nothing(tmp_path):
    """Killed at ten moments, the result is absent or whole, and the next export is not disturbed."""
    model = make_tiny_hf(tmp_path / "plain", "qwen3", depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    command = [sys.executable, "-m", "swiftlite", "export", "--model", str(model), "--quant_method", "rtn"]
    began = time.monotonic()
    subprocess.run([*command, "--output_dir", str(tmp_path / "whole")], check=True)
    duration = time.monotonic() - began
    expected = stored(tmp_path / "whole")
    for moment in range(10):
        out = tmp_path / f"out-{moment}"
        # The files are written at the end of the process, after imports.
        process = subprocess.Popen([*command, "--output_dir", str(out)])
        time.sleep(duration * (0.7 + 0.03 * moment))
        process.kill()
        process.wait()
        if not out.exists():
            subprocess.run([*command, "--output_dir", str(out)], check=True)
        assert_same_bits(stored(out), expected)
        assert not list(tmp_path.glob(".out-*"))


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_blocks"])
def test_transformers_keeps_the_output_layer_of_a_tied_model(mesh, tmp_path, name):
    """The files have no tensor for the tied output layer, so its name must be listed."""
    model = make_tiny_hf(
        tmp_path / "plain", "qwen3", dtype=torch.bfloat16, tie_word_embeddings=True, with_tokenizer=True
    )
    assert "lm_head.weight" not in stored(model)
    out = run(model, mesh, tmp_path / "out", **METHODS[name])
    quantization = read_config(out)["quantization_config"]
    assert "lm_head" in (quantization.get("ignore") or quantization["modules_to_not_convert"])
    if name == "fp8_blocks":  # transformers computes this format on GPUs only
        return
    both: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    loaded, report = both
    assert not report["missing_keys"]
    assert torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    assert bool(loaded(torch.tensor([[1, 2, 3]])).logits.isfinite().all())


def test_codes_without_a_declaration_are_refused(mesh, tmp_path):
    model = make_tiny_hf(tmp_path / "plain", "qwen3", dtype=torch.bfloat16, with_tokenizer=True)
    out = run(model, mesh, tmp_path / "out", **METHODS["int8"])
    config = read_config(model)
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=naming("int8 quantization_config")):
        run(out, mesh, tmp_path / "again", **METHODS["fp8"])
    assert not (tmp_path / "again").exists()


def test_matrices_that_engines_merge_have_whole_blocks(mesh, tmp_path):
    """With q, k and v of 64, 32 and 32 rows, blocks of 48 rows would not be those of the merged matrix."""
    model = make_tiny_hf(tmp_path / "plain", "qwen3", dtype=torch.bfloat16, with_tokenizer=True)
    with pytest.raises(UserError, match=naming("--quant_block 48 rows")):
        run(model, mesh, tmp_path / "out", quant_method="fp8", quant_block=48)
    assert not (tmp_path / "out").exists()
