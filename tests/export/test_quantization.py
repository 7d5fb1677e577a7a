"""Test `export --quant_method`: the result against the library of the format, all families, failures, ranks."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.export.run import convert
from swiftlite.families import FAMILIES
from swiftlite.families.resolved import resolve
from tests.messages import mentions, naming
from tests.tiers import some_of
from tests.tiny import LATENT, STEP, VLLM_LATENT_SIZES, make_tiny_hf

quantized = pytest.importorskip("tests.quantized", exc_type=ImportError)

METHODS: dict[str, dict[str, Any]] = {
    "int8": {"quant_method": "rtn"},
    "int4": {"quant_method": "rtn", "quant_bits": 4, "group_size": quantized.GROUP},
    "fp8": {"quant_method": "fp8"},
    "nvfp4": {"quant_method": "nvfp4"},
    "fp8_blocks": {"quant_method": "fp8", "quant_block": quantized.BLOCK[0]},
}
"""Options by the format's name in `tests.quantized`."""


def run(model: Path, mesh, output: Path, **options: Any) -> Path:
    convert(ExportArgs(model=str(model), output_dir=str(output), **options), mesh)
    return output


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in directory.glob("*.safetensors") for key, tensor in load_file(file).items()}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype is tensor.dtype, key
        assert torch.equal(found[key].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), key


@pytest.mark.parametrize("heads", ["keep", "block"])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "nvfp4"])
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


def sizes_of(family: str) -> dict[str, Any]:
    """Return sizes of a tiny model with which all matrices consist of groups of 16 columns."""
    return {"q_lora_rank": 32} | VLLM_LATENT_SIZES if family in LATENT else {}


MERGED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Projections that engines compute as one matrix."""


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe", "deepseek_v3", "qwen3_5"])
def test_nvfp4_has_one_global_scale_per_merged_matrix(mesh, tmp_path, family):
    """Codes and scales have the bits that the library computes, and are read as the numbers that it decompresses."""
    model = make_tiny_hf(tmp_path / "plain", family, 1, dtype=torch.float32, with_tokenizer=True, **sizes_of(family))
    out = run(model, mesh, tmp_path / "out", quant_heads="block", quant_method="nvfp4")
    plain, written = stored(model), stored(out)
    trunk, heads = quantized.linear_modules(model, plain)
    with Checkpoint(out, format_of(read_config(out))) as checkpoint:
        for module in trunk + heads:
            parent, _, name = module.rpartition(".")
            together = next((names for names in MERGED if name in names), (name,))
            shards = [plain.get(f"{parent}.{shard}.weight") for shard in together]
            largest = torch.stack([shard.abs().max() for shard in shards if shard is not None]).max()
            expected = quantized.nvfp4_parts(plain[f"{module}.weight"], largest)
            assert_same_bits({part: written[f"{module}.{part}"] for part in expected}, expected)
            numbers = quantized.FORMATS["nvfp4"].decompress(expected)
            assert torch.equal(checkpoint.read(f"{module}.weight").to(numbers.dtype), numbers)


STACKED = ("gemma4", "gpt_oss", "qwen3_vl_moe", *STEP)
"""Families whose files have the matrices of all experts in one tensor."""
QUANTIZED = [family for family in FAMILIES if family not in STACKED]


@pytest.mark.parametrize(
    ("family", "name"),
    some_of(
        product(QUANTIZED, METHODS),
        *((family, "int8") for family in QUANTIZED),
        ("qwen3_moe", "int4"),
        ("deepseek_v3", "fp8_blocks"),
        ("qwen3_5", "fp8"),
        ("qwen3_moe", "nvfp4"),
    ),
)
def test_every_family(mesh, tmp_path, family, name):
    sizes = sizes_of(family) if name == "nvfp4" else {}
    model = make_tiny_hf(tmp_path / "plain", family, depth=1, dtype=torch.bfloat16, with_tokenizer=True, **sizes)
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
    convert(ExportArgs(model=str(model), output_dir=str(tmp_path / "run"), to_mcore=True), mesh)
    options = {"model": str(tmp_path / "run"), "output_dir": str(tmp_path / "out"), "to_hf": True}
    convert(ExportArgs(**options, **METHODS["int8"]), mesh)
    assert_same_bits(stored(tmp_path / "out"), stored(run(model, mesh, tmp_path / "direct", **METHODS["int8"])))
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "run", "out", "direct"}


def test_heads_can_be_quantized_in_files_of_several_shards(mesh, tmp_path):
    model = make_tiny_hf(tmp_path / "plain", "glm4_moe", depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    out = run(model, mesh, tmp_path / "out", quant_heads="block", max_shard_size_gb=3e-5, **METHODS["int8"])
    assert len(list(out.glob("*.safetensors"))) > 2
    _, heads = quantized.linear_modules(model, stored(model))
    assert all(stored(out)[f"{module}.weight"].dtype is torch.int8 for module in heads)
    assert audit_hf(out, resolve(out).family) == []


@pytest.mark.parametrize("family", STACKED)
def test_stacks_are_refused(mesh, tmp_path, family):
    model = make_tiny_hf(tmp_path / "plain", family, dtype=torch.bfloat16, with_tokenizer=True)
    with pytest.raises(UserError, match=naming(f"--quant_method {family}")):
        run(model, mesh, tmp_path / "out", **METHODS["int8"])
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize(("columns", "size"), [(256, 128), (192, 64), (96, 32)])
def test_the_default_size_of_groups_divides_all_matrices(mesh, tmp_path, caplog, columns, size):
    caplog.set_level("INFO", logger="swiftlite")
    model = make_tiny_hf(
        tmp_path / "plain",
        "qwen3",
        dtype=torch.bfloat16,
        with_tokenizer=True,
        hidden_size=columns,
        intermediate_size=256,
        head_dim=64,
    )
    out = run(model, mesh, tmp_path / "out", quant_method="rtn", quant_bits=4)
    (group,) = read_config(out)["quantization_config"]["config_groups"].values()
    assert group["weights"]["group_size"] == size
    assert any(mentions(record.getMessage(), f"--group_size {size}") for record in caplog.records) is (size < 128)


def test_without_a_size_of_groups_other_methods_are_proposed(mesh, tmp_path):
    model = make_tiny_hf(tmp_path / "plain", "qwen3", dtype=torch.bfloat16, with_tokenizer=True, intermediate_size=48)
    with pytest.raises(
        UserError, match=naming("--group_size 32 model.layers.0.mlp.down_proj.weight 48 --quant_method")
    ):
        run(model, mesh, tmp_path / "out", quant_method="rtn", quant_bits=4)
    with pytest.raises(
        UserError, match=naming("--group_size 32 model.layers.0.mlp.down_proj.weight 48 --quant_method")
    ):
        run(model, mesh, tmp_path / "out", quant_method="rtn", quant_bits=4, group_size=32)
    assert not (tmp_path / "out").exists()


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
