"""Test with SGLang's own loaders that it builds each module of the heads as the files have it.

One process with SGLang loads all checkpoints of this file. On a CPU, SGLang 0.5.23 can only build models in FP8 with
blocks: compressed-tensors asks for the version of a GPU, awq does not support bfloat16, and gptq on a CPU does not read
the list of modules. For these methods, SGLang's functions that compare a module's name with the list are called.
"""

import importlib.util
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite.engines.loading.load_report import LoadReport
from swiftlite.engines.quantized_heads import quantized_head_problems
from swiftlite.engines.served_model import resolve_served
from swiftlite.families.serving.built import builds_quantized, modules_of
from swiftlite.families.serving.index import CONVENTIONS, MATCHINGS
from swiftlite.families.serving.quantized import head_modules, unlisted_engines, with_heads_kept
from tests.engines.dry_loads import dry_loads
from tests.engines.quantized_lists import list_plain, list_trunk
from tests.quantized import quantize_hf
from tests.stand_ins import sglang_environment
from tests.tiers import some_of
from tests.tiny import CLASSES, DSA, HYBRID, LATENT, ONLY_IN_VLLM, VLLM_LATENT_SIZES, make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
MATCH_ALL = """
import json, sys
from types import SimpleNamespace
from sglang.srt.layers.quantization.awq.awq import is_layer_skipped_awq
from sglang.srt.layers.quantization.compressed_tensors.utils import should_ignore_layer
from sglang.srt.layers.quantization.utils import get_dynamic_override
MATCH = {
    "compressed-tensors": lambda listed, name, fused: should_ignore_layer(name, listed["ignore"], fused),
    "gptq": lambda listed, name, fused: get_dynamic_override(SimpleNamespace(**listed), name) is False,
    "awq": lambda listed, name, fused: is_layer_skipped_awq(name, listed["modules_to_not_convert"]),
}
cases, fused = json.load(sys.stdin)
print(json.dumps([MATCH[listed["quant_method"]](listed, name, fused) for listed, name in cases]))
"""
# Sizes with which no block of 128 x 128 belongs to two projections.
DENSE: dict[str, Any] = {"hidden_size": 128, "head_dim": 128, "intermediate_size": 128}
EXPERTS: dict[str, Any] = DENSE | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
SIZES: dict[str, dict[str, Any]] = dict.fromkeys(LATENT, EXPERTS | VLLM_LATENT_SIZES | {"q_lora_rank": 128})
ONE_HEAD = {"num_attention_heads": 1}  # SGLang ignores head_dim of these families
SIZES |= dict.fromkeys(("exaone4", "olmo2", "olmo3"), DENSE | ONE_HEAD)
SIZES |= {"qwen2_moe": EXPERTS | ONE_HEAD, "qwen3_moe": EXPERTS}
SIZES |= {"mimo_v2_flash": EXPERTS | {"v_head_dim": 128}}
SIZES |= {"minimax_m2": DENSE, "glm4_moe": EXPERTS, "hy_v3": EXPERTS | {"expert_hidden_dim": 128}}
# SGLang builds linear attention on GPUs only.
WITHOUT_SCALES = ("llama", "mistral")
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""`packed_modules_mapping` of SGLang's classes."""
METHODS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"config_groups": {"group_0": {"targets": ["Linear"]}}},
    "gptq": {},
    "awq": {},
}
"""A quantization_config of each method that lists nothing."""
# Stacks of gpt-oss are only stored in MXFP4, and `quantize_hf` does not quantize those of Step-3.5. SGLang builds
# indexers on GPUs only.
STACKED = ("gpt_oss", "step3p5")
FAMILIES = [family for family in CLASSES if family not in (*DSA, *HYBRID, *ONLY_IN_VLLM, *WITHOUT_SCALES, *STACKED)]
# No list can describe plain heads of these for SGLang (`unlisted_engines`).
UNLISTED = [("qwen3_moe", False), ("mimo", False)]
CASES = [case for case in product(FAMILIES, (False, True)) if case not in UNLISTED]


def make(directory: Path, family: str, block: bool) -> Path:
    sizes = SIZES.get(family, DENSE)
    source = make_tiny_hf(directory / "source", family, 1, dtype=torch.bfloat16, **sizes)
    model = quantize_hf(source, directory / "model", "fp8_blocks_128", block=block, ignore=[])
    list_plain(model, keeps_block=not block)
    return model


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory) -> dict[Any, tuple[LoadReport, Path]]:
    """Return the reports of the cases that run in this session."""
    folder = tmp_path_factory.mktemp("models")
    asked: dict[Any, Path] = {}
    for item in request.session.items:
        if item.originalname == test_modules_are_built_as_the_files_have_them.__name__ and item.path == Path(__file__):
            case = tuple(item.callspec.params[name] for name in ("family", "block"))
            asked[case] = make(folder / "-".join(map(str, case)), *case)
    for family in WITHOUT_SCALES:
        asked[family] = make(folder / family, family, block=True)
    asked["without a list"] = make(folder / "without-a-list", "qwen3", block=False)
    list_trunk(asked["without a list"])
    return {name: (report, asked[name]) for name, report in dry_loads("sglang", asked).items()}


@pytest.mark.parametrize(
    ("family", "block"), some_of(CASES, *product(("qwen3", "glm4_moe"), (False, True)), ("mimo", True))
)
def test_modules_are_built_as_the_files_have_them(reports, family, block):
    report, directory = reports[family, block]
    assert report.problems == []
    quantized, _, plain = report.draft_modules.partition("plain: ")
    assert ("o_proj" in quantized) is block
    assert ("o_proj" in plain) is not block
    assert quantized_head_problems(resolve_served(directory), ["sglang"]) == []


def test_a_missing_list_is_reported(reports):
    report, directory = reports["without a list"]
    assert report.problems
    assert quantized_head_problems(resolve_served(directory), ["sglang"])


def test_lists_mean_to_sglang_what_the_rules_say(tmp_path):
    """For all modules in decoder layers of heads except experts, in all families, with plain and quantized heads."""
    cases: list[tuple[dict[str, Any], str]] = []
    expected = []
    for family, keeps_block, (method, without) in product(CLASSES, (False, True), METHODS.items()):
        model = resolve_served(make_tiny_hf(tmp_path / f"{family}-{method}-{keeps_block}", family, 1))
        known = CONVENTIONS["sglang"](model.family)
        unlisted = unlisted_engines(method, model.family, model.config, keeps_block=keeps_block)
        if known is None or "sglang" in unlisted:
            continue
        given = {"quant_method": method, **without}
        listed = with_heads_kept(given, model.family, model.config, keeps_block=keeps_block)
        for module in modules_of(known, head_modules(model.family, model.config, 0), model.config, 0):
            if ".experts" not in module.name:
                cases.append((listed, module.name))
                expected.append(not builds_quantized(listed, MATCHINGS["sglang"], module, {}))
    done = subprocess.run(
        [sys.executable, "-c", MATCH_ALL],
        input=json.dumps([cases, FUSED]),  # an argument has at most 128 KB
        env=sglang_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    assert set(expected) == {False, True}


@pytest.mark.parametrize("family", WITHOUT_SCALES)
def test_scales_that_sglang_does_not_read_are_reported(reports, family):
    """SGLang's class for Llama and Mistral renames `weight_scale_inv`, and finds no parameter with the new name. It
    reports neither this nor the uninitialized scales."""
    report, _ = reports[family]
    assert any("self_attn.qkv_proj.weight_scale_inv" in line for line in report.problems)
