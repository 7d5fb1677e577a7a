"""Test with vLLM's own loaders that it builds each module of the heads as the files have it, and what doctor reports
otherwise.

One process with vLLM loads all checkpoints of this file.
"""

import importlib.util
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite.engines.loading.load_report import LoadReport
from swiftlite.engines.quantized_heads import quantized_head_problems
from swiftlite.engines.served_model import resolve_served
from tests.engines.dry_loads import dry_loads
from tests.engines.quantized_lists import change_quantization, list_plain, list_trunk
from tests.quantized import quantize_hf
from tests.tiers import some_of
from tests.tiny import (
    CLASSES,
    DSA,
    HYBRID,
    LATENT,
    VLLM_LATENT_SIZES,
    VLLM_VALUE_SIZES,
    WRAPPED,
    make_tiny_hf,
    make_tiny_vision_hf,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
# No kernel for CPUs computes NVFP4. A dry load does not run kernels.
WITH_NVFP4 = """
from vllm.model_executor.kernels.linear import MarlinNvFp4LinearKernel
MarlinNvFp4LinearKernel.is_supported = lambda *arguments: (True, None)
"""
SMALL: dict[str, Any] = {"q_lora_rank": 32} | VLLM_LATENT_SIZES
WHOLE_BLOCKS: dict[str, Any] = {"hidden_size": 128, "head_dim": 128, "intermediate_size": 128}
"""Sizes with which no block of 128 x 128 belongs to two projections."""
WHOLE_EXPERTS: dict[str, Any] = WHOLE_BLOCKS | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
OF_BLOCKS: dict[str, dict[str, Any]] = {
    "qwen3": WHOLE_BLOCKS,
    "glm4_moe": WHOLE_EXPERTS,
    "minimax_m2": WHOLE_BLOCKS,
    "deepseek_v3": SMALL | WHOLE_EXPERTS | {"q_lora_rank": 128},
    "qwen3_next": WHOLE_EXPERTS | {"linear_num_key_heads": 64, "linear_num_value_heads": 128},
}
"""Families with blocks of 128 x 128, and their sizes: one of each kind of names."""
WITHOUT_EXPERTS = ("qwen3", "llama", "qwen2", "mimo", "qwen3_5_text")
CASES = [
    # Stacks of gpt-oss are only stored in MXFP4. vLLM has indexers on GPUs only.
    *product([family for family in CLASSES if family not in ("gpt_oss", *DSA)], ("int8", "int4"), (False, True)),
    *product(OF_BLOCKS, ("fp8_blocks_128",), (False, True)),
    *product(WITHOUT_EXPERTS, ("awq", "nvfp4"), (False, True)),
    *product(WITHOUT_EXPERTS, ("gptq",), (False,)),
    *product(("qwen3", "llama"), ("gptq",), (True,)),
]
# vLLM builds `o_proj` in heads of MiMo-V2-Flash always plain.
CASES = [case for case in CASES if (case[0], case[2]) != ("mimo_v2_flash", True)]
# vLLM's draft class for Step-3.5 requires scales of a KV cache in every quantized checkpoint.
CASES = [case for case in CASES if case[0] != "step3p5"]
"""Family, format, and whether the decoder layer of the head is quantized. vLLM has no kernel for experts in 4 bits or
int8 on a CPU.
"""
# Each of vLLM's names, ours, and a wrapper of a vision-language model
FIRST = ("qwen3", "qwen3_moe", "mimo", "glm4_moe", "deepseek_v3", "hy_v3", "qwen3_next", "qwen3_5")
CHOSEN = some_of(
    CASES,
    *product(FIRST, ("int8",), (False, True)),
    *product(OF_BLOCKS, ("fp8_blocks_128",), (False,)),
    ("qwen3", "int4", True),
    *product(("qwen3", "qwen3_5_text"), ("nvfp4",), (False, True)),
    *product(("qwen3", "mimo"), ("awq",), (False,)),
    *product(("qwen3",), ("gptq",), (False, True)),
)


def make_source(directory: Path, family: str, name: str) -> Path:
    sizes: dict[str, Any] = {}
    if name == "fp8_blocks_128":
        sizes = OF_BLOCKS[family]
    elif family in LATENT:
        sizes = SMALL
    elif family == "mimo_v2_flash":
        sizes = VLLM_VALUE_SIZES
    elif family in HYBRID:  # outputs that AWQ's format can pack
        sizes = {"linear_num_key_heads": 8, "linear_num_value_heads": 32}
    make = make_tiny_vision_hf if family in WRAPPED else make_tiny_hf
    return make(directory, family, 1, dtype=torch.bfloat16, **sizes)


def make(directory: Path, family: str, name: str, block: bool) -> Path:
    source = make_source(directory / "source", family, name)
    experts = name == "fp8_blocks_128"
    model = quantize_hf(source, directory / "model", name, block=block, experts=experts, ignore=[])
    list_plain(model, keeps_block=not block)
    return model


def mimo_with_names_of_files(directory: Path) -> None:
    change_quantization(directory, ignore=["lm_head", "re:model[.]mtp_layers[.].*"])


def with_forgotten_projection(directory: Path) -> None:
    change_quantization(directory, ignore=["lm_head", "re:mtp[.]layers[.].*", "re:.*[.]experts[.].*", "re:.*gate$"])


WRONG = {
    "mimo": mimo_with_names_of_files,
    "glm4_moe": list_trunk,
    "qwen3_next": with_forgotten_projection,
}
"""What makes the list of a model with a plain head wrong."""


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory) -> dict[Any, tuple[LoadReport, Path]]:
    """Return the reports of the cases that run in this session."""
    folder = tmp_path_factory.mktemp("models")
    asked: dict[Any, Path] = {}
    test = test_modules_are_built_as_the_files_have_them
    for item in request.session.items:
        if item.originalname == test.__name__ and item.path == Path(__file__):
            case = tuple(item.callspec.params[name] for name in ("family", "name", "block"))
            asked[case] = make(folder / "-".join(map(str, case)), *case)
    for family, change in {**WRONG, "qwen3": list_trunk}.items():
        asked[family] = make(folder / f"{family}-wrong", family, "int8", block=False)
        change(asked[family])
    return {name: (report, asked[name]) for name, report in dry_loads("vllm", asked, prepare=WITH_NVFP4).items()}


@pytest.mark.parametrize(("family", "name", "block"), CHOSEN)
def test_modules_are_built_as_the_files_have_them(reports, family, name, block):
    report, directory = reports[family, name, block]
    if name == "fp8_blocks_128" and not torch.cpu._is_amx_tile_supported():
        assert len(report.problems) == 1  # vLLM 0.32 has no other kernel for blocks on a CPU
        assert "AMX" in report.problems[0]
        return
    assert report.problems == []
    quantized, _, plain = report.draft_modules.partition("plain: ")
    assert ("o_proj" in quantized) is block
    assert ("o_proj" in plain) is not block
    assert quantized_head_problems(resolve_served(directory), ["vllm"]) == []


@pytest.mark.parametrize("family", WRONG)
def test_a_wrong_list_is_reported(reports, family):
    """vLLM loads the plain tensors into quantized modules without an error."""
    report, directory = reports[family]
    predicted = quantized_head_problems(resolve_served(directory), ["vllm"])
    assert predicted
    for problem in predicted:
        tensor = problem.partition(" ")[0]
        assert any(line.startswith(f"{tensor} is bfloat16") and "int8" in line for line in report.problems)
    assert any("weight_scale" in line and "uninitialized" in line for line in report.problems)


def test_the_classes_of_the_plugin_require_every_scale(reports):
    """swiftlite's draft classes stop if a parameter has no tensor; vLLM's own continue."""
    report, directory = reports["qwen3"]
    assert report.draft is None
    assert any("missing: mtp.layers.0.mlp.down_proj.weight_scale" in line for line in report.problems)
    assert quantized_head_problems(resolve_served(directory), ["vllm"])
