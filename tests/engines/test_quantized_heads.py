"""Test the check that quantization_config describes the heads in the files, for every family, engine and method.

`vllm/test_dry_load.py` compares its result with the modules that vLLM builds.
"""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.encoding.quantization import Quantization
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.engines.index import ENGINES
from swiftlite.engines.quantized_heads import (
    check_quantized_heads,
    quantized_head_problems,
    quantized_modules,
    unsupported_engines,
)
from swiftlite.engines.served_model import resolve_served
from swiftlite.families.serving.built import head_problems
from swiftlite.families.serving.quantized import METHODS, unlisted_engines, with_heads_kept
from tests.engines.quantized_lists import change_quantization, list_plain, list_trunk
from tests.messages import naming
from tests.quantized import linear_modules, quantize_hf
from tests.tiny import CLASSES, ONLY_IN_TRANSFORMERS, ONLY_IN_VLLM, make_tiny_hf, mtp_names

FORMATS = {"compressed-tensors": "int8", "fp8": "fp8_blocks"}
ENTIRE = {
    "compressed-tensors": {"config_groups": {"group_0": {"targets": ["Linear"]}}},
    "fp8": {},
    "gptq": {},
    "awq": {},
    "modelopt": {"quant_algo": "FP8"},
}
"""A quantization_config of each method that lists nothing."""


def make(directory: Path, family: str, method: str, block: bool) -> Path:
    """Write a quantized model with heads, whose list contains only modules of the trunk."""
    source = make_tiny_hf(directory / "source", family, 1, dtype=torch.bfloat16)
    model = quantize_hf(source, directory / "model", FORMATS[method], block=block, ignore=[])
    list_trunk(model)
    return model


@pytest.mark.parametrize("family", [family for family in CLASSES if family not in ONLY_IN_TRANSFORMERS])
def test_the_list_describes_the_heads(tmp_path, family):
    """For every method, with plain and with quantized decoder layers of two heads."""
    model = resolve_served(make_tiny_hf(tmp_path, family, 2))
    plain = dict.fromkeys(quantized_modules(Checkpoint(tmp_path).stored), False)
    trunk, heads = linear_modules(tmp_path, [f"{name}.weight" for name in plain])
    for method, keeps_block in product(METHODS, (False, True)):
        files = plain | dict.fromkeys(trunk + heads * (not keeps_block), True)
        without = Quantization({"quant_method": method, **ENTIRE[method]})
        listed = with_heads_kept(without, model.family, model.config, keeps_block=keeps_block)
        unlisted = unlisted_engines(method, model.family, model.config, keeps_block=keeps_block)
        for engine in ("vllm", "sglang"):
            found = head_problems(listed, model.family, model.config, files, [engine])
            if engine not in unlisted:
                assert found == []
            elif not family.startswith("qwen3_5"):  # vLLM renames the modules that it reads from the files
                assert found
            is_listed_by_files = engine == "vllm" and method in ("gptq", "awq")
            is_plain_without = is_listed_by_files or (engine == "sglang" and family in (*ONLY_IN_VLLM, "step3p5"))
            if keeps_block and not is_plain_without:
                assert head_problems(without, model.family, model.config, files, [engine])


def test_lists_are_extended(tmp_path):
    """Entries of the trunk remain, and adding the heads again changes nothing."""
    for method, key, entry in (
        ("compressed-tensors", "ignore", "lm_head"),
        ("fp8", "modules_to_not_convert", "lm_head"),
        ("fp8", "ignored_layers", "lm_head"),
        ("awq", "modules_to_not_convert", "visual"),
        ("modelopt", "ignore", "visual"),
    ):
        model = resolve_served(make_tiny_hf(tmp_path / f"{method}-{key}", "qwen3", 1))
        given = Quantization({"quant_method": method, key: [entry]})
        once = with_heads_kept(given, model.family, model.config, keeps_block=True)
        assert once.content[key][0] == entry
        assert len(once.content[key]) > 1
        assert given.content == {"quant_method": method, key: [entry]}
        assert with_heads_kept(once, model.family, model.config, keeps_block=True) == once


def test_an_unknown_method(tmp_path):
    model = resolve_served(make_tiny_hf(tmp_path, "qwen3", 1))
    with pytest.raises(UserError, match=naming("quantization_config of quark")):
        with_heads_kept(Quantization({"quant_method": "quark"}), model.family, model.config, keeps_block=True)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_sglang_names_the_head_like_the_first_layer(tmp_path, family):
    directory = make(tmp_path, family, "compressed-tensors", block=False)
    list_plain(directory, keeps_block=True)
    with pytest.raises(UserError, match=naming("SGLang model.layers.0.self_attn.qkv_proj")):
        check_quantized_heads(resolve_served(directory), ENGINES["sglang"])


def refusal(directory: Path, engine: str = "vllm") -> str:
    with pytest.raises(UserError) as error:
        check_quantized_heads(resolve_served(directory), ENGINES[engine])
    return error.value.problem


def test_mimo_with_the_names_of_the_files(tmp_path):
    directory = make(tmp_path, "mimo", "compressed-tensors", block=False)
    change_quantization(directory, ignore=["lm_head", "re:model[.]mtp_layers[.].*"])
    problem = refusal(directory)
    assert "model.mtp_layers.0.self_attn.q_proj.weight" in problem
    assert "vLLM builds model.layers.2.self_attn.qkv_proj quantized" in problem


def test_glm4_without_a_list(tmp_path):
    directory = make(tmp_path, "glm4_moe", "compressed-tensors", block=False)
    problem = refusal(directory)
    assert "model.layers.2.self_attn.q_proj.weight" in problem
    assert "model.layers.2.mlp.shared_experts.down_proj.weight" in problem


@pytest.mark.parametrize("shard", ["self_attn.k_proj", "mlp.up_proj"])
def test_one_shard_of_a_fused_module(tmp_path, shard):
    source = make_tiny_hf(tmp_path / "source", "qwen3", 1, dtype=torch.bfloat16)
    plain = f"mtp.layers.0.{shard}"
    directory = quantize_hf(source, tmp_path / "model", "int8", block=True, but=[plain], ignore=["lm_head", plain])
    problem = refusal(directory)
    assert re.search(rf"is quantized, but {re.escape(plain)}.weight is plain", problem)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_a_forgotten_projection(tmp_path, family):
    directory = make(tmp_path, family, "compressed-tensors", block=False)
    change_quantization(directory, ignore=["lm_head", "re:mtp[.]layers[.].*"])
    projection = mtp_names(family, 0)[0]["projection"]
    assert f"{projection} is plain" in refusal(directory)


def test_a_plain_head_is_not_checked_without_quantization(tmp_path):
    model = resolve_served(make_tiny_hf(tmp_path, "qwen3", 1))
    assert (quantized_head_problems(model), unsupported_engines(model)) == ([], [])
    other = replace(model, config={**model.config, "quantization_config": {"quant_method": "quark"}})
    assert quantized_head_problems(other) == []
