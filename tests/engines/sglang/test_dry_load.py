"""Test SGLang's own loaders: `doctor --engine sglang`, and that SGLang builds each module of quantized heads as the
files have it.

One process with SGLang loads all checkpoints of this file. On a CPU, SGLang 0.5.23 can only build models in FP8 with
blocks: compressed-tensors asks for the version of a GPU, awq does not support bfloat16, and gptq on a CPU does not read
the list of modules. For these methods, SGLang's functions that compare a module's name with the list are called.
"""

import importlib.util
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.args.commands import ExportArgs
from swiftlite.bridge.encoding.quantization import Quantization
from swiftlite.bridge.hf_config import DRAFT_FOLDER
from swiftlite.engines.engine import Sampling
from swiftlite.engines.quantized_heads import quantized_head_problems
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.sglang.engine import sampling_params
from swiftlite.export.run import convert
from swiftlite.families.dflash import SGLANG_TRUNKS
from swiftlite.families.gemma4_layers import key_layers
from swiftlite.families.serving.built import builds_quantized, modules_of
from swiftlite.families.serving.index import CONVENTIONS, MATCHINGS
from swiftlite.families.serving.quantized import head_modules, unlisted_engines, with_heads_kept
from tests.e2e.drafted import exported, sizes_of
from tests.engines.broken import (
    BROKEN,
    BROKEN_DAILY,
    BROKEN_FAMILIES,
    daily_if_broken,
    damage,
    make,
    projection,
    write_broken,
)
from tests.engines.dflash_reference import add_drafter
from tests.engines.dry_loads import dry_loads
from tests.engines.gemma4_assistant_reference import config_for, declare, make_assistant, settings_of
from tests.engines.joint import filtered
from tests.engines.quantized_lists import list_plain, list_trunk
from tests.engines.reference import convention
from tests.messages import mention_each, mentions
from tests.published import library
from tests.quantized import quantize_hf
from tests.tiers import selected, some_of
from tests.tiny import CANNOT_DRAFT, CLASSES, DSA, HYBRID, LATENT, VLLM_LATENT_SIZES, make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
# SGLang keeps states of linear attention and indexers on GPUs alone ("extra_buffer requires platform support"), and
# neither SGLang nor the plugin has a draft for heads of the others.
LOADABLE = [family for family in CLASSES if family not in (*DSA, *HYBRID, "nemotron_h", *CANNOT_DRAFT["sglang"])]
# SGLang does not read `n_groups` of Nemotron-H, which is 8 in all published models.
COMMON_WINDOW = ("mistral", "phi3")
"""Families whose layers all have the same window, which SGLang ignores."""
WHOLE = [(family, depth) for family in LOADABLE for depth in (0, 1)]
# How SGLang loads a trunk without heads does not depend on the heads of the family.
WITHOUT_HEADS = ("mimo", "qwen3")

ASSISTED = {
    "gemma-4-26B-A4B-it": "Gemma4AssistantForCausalLM",
    "gemma-4-12B-it": "Gemma4UnifiedAssistantForCausalLM",
}
"""Published trunks with experts and towers, or with projections of images and sound -> SGLang's class of assistants."""
PUBLISHED = ("Llama-3.1-8B", "Qwen3-8B-FP8", "DeepSeek-V3", "EXAONE-4.0-1.2B", "EXAONE-4.0-32B")
PUBLISHED += (*ASSISTED, "gemma-4-E2B-it", "NVIDIA-Nemotron-3-Super-120B-A12B", "Nemotron-H-56B-Base-8K")
"""Shapes of published models: a padded vocabulary, FP8 with both types of scales, windows in no or some layers, layers
that share keys, Mamba-2 with and without experts."""
IN_SGLANG = "tests.engines.sglang.in_sglang"
LOGITS = torch.tensor([1.2, -1.0, 2.0, 0.4, 1.5, 0.0, 1.0])
FILTERS: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 5, "min_p": 0.3}]
TWO_FILTERS: dict[str, Any] = {"top_k": 4, "top_p": 0.8}
# Sizes with which no block of 128 x 128 belongs to two projections.
DENSE: dict[str, Any] = {"hidden_size": 128, "head_dim": 128, "intermediate_size": 128}
EXPERTS: dict[str, Any] = DENSE | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
SIZES: dict[str, dict[str, Any]] = dict.fromkeys(LATENT, EXPERTS | VLLM_LATENT_SIZES | {"q_lora_rank": 128})
ONE_HEAD = {"num_attention_heads": 1}  # SGLang ignores head_dim of these families
SIZES |= dict.fromkeys(("exaone4", "olmo2", "olmo3"), DENSE | ONE_HEAD)
SIZES |= {"qwen2_moe": EXPERTS | ONE_HEAD, "qwen3_moe": DENSE | {"moe_intermediate_size": 128}}
SIZES |= {"ernie4_5_moe": EXPERTS, "mimo_v2_flash": EXPERTS | {"v_head_dim": 128}}
SIZES |= {
    "minimax_m2": DENSE,
    "mixtral": DENSE | ONE_HEAD,
    "glm4_moe": EXPERTS,
    "hy_v3": EXPERTS | {"expert_hidden_dim": 128},
}
# SGLang builds linear attention on GPUs only. Widths of layers with Mamba-2 do not consist of whole blocks.
WITHOUT_SCALES = ("llama", "mistral", "phi3", "smollm3")
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
STACKED = ("gpt_oss", "step3p5", "nemotron_h")
BLOCKS = [(trunk, 0) for trunk in SGLANG_TRUNKS] + [("llama", 8), ("qwen3", 8)]
"""Trunks of block drafters, and the rank of the Markov head; 0 for DFlash."""
QUANTIZED = [
    family for family in CLASSES if family not in (*DSA, *HYBRID, *CANNOT_DRAFT["sglang"], *WITHOUT_SCALES, *STACKED)
]
# No list can describe plain heads of these for SGLang (`unlisted_engines`).
UNLISTED = [("qwen3_moe", False), ("mimo", False)]
# SGLang names the trunk's experts of Mixtral without `model.`, and takes them for those of a listed plain head.
UNLISTED.append(("mixtral", False))
QUANTIZED_CASES = [case for case in product(QUANTIZED, (False, True)) if case not in UNLISTED]


def make_quantized(directory: Path, family: str, block: bool) -> Path:
    sizes = SIZES.get(family, DENSE)
    source = make_tiny_hf(directory / "source", family, 1, dtype=torch.bfloat16, **sizes)
    model = quantize_hf(source, directory / "model", "fp8_blocks_128", block=block, ignore=[])
    list_plain(model, keeps_block=not block)
    return model


@pytest.fixture(scope="module")
def models(request, mesh, tmp_path_factory) -> dict[Any, Path]:
    """Return the directories of all models; of quantized ones, those of the cases that run in this session."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[Any, Path] = {}
    for family, depth in selected(request, "family", "depth"):
        made[family, depth] = make(folder / f"{family}-{depth}", family, depth)
    for model in PUBLISHED:
        made[model] = library.build(folder / model, model)
    for model in ASSISTED:
        made[model, "assistant"] = with_assistant(library.build(folder / f"{model}-assisted", model))
    made["incomplete assistant"] = with_assistant(library.build(folder / "incomplete", "gemma-4-12B-it"))
    drafter = made["incomplete assistant"] / DRAFT_FOLDER / "model.safetensors"
    tensors = load_file(drafter)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, drafter, metadata={"format": "pt"})
    dense = ["linear_attention", "mlp", "full_attention", "mlp"]
    made["dense Nemotron-H"] = make_tiny_hf(
        folder / "dense", "nemotron_h", 1, layers_block_type=dense, n_groups=8, mamba_num_heads=8
    )
    for family, name in selected(request, "family", "name"):
        made[family, name] = write_broken(folder, family, name)
    # SGLang's InternLM3 is a Llama by another name, for which neither SGLang nor the plugin has a draft.
    made["itself"] = make(folder / "itself", "llama", 0)
    damage(made["itself"], "llama", 1, None, architectures=["InternLM3ForCausalLM"])
    for family in DSA:
        made[family] = make(folder / family, family, 1)
    for family in COMMON_WINDOW:
        made[family, "window"] = make(folder / f"{family}-window", family, 0)
        damage(made[family, "window"], family, 0, None, sliding_window=8)
    for family, block in selected(request, "family", "block"):
        made[family, "block" if block else "plain"] = make_quantized(folder / f"{family}-{block}", family, block)
    for family in WITHOUT_SCALES:
        made[family, "block"] = make_quantized(folder / f"{family}-without-scales", family, block=True)
    made["without a list"] = make_quantized(folder / "without-a-list", "qwen3", block=False)
    list_trunk(made["without a list"])
    for trunk, rank in selected(request, "trunk", "rank"):
        name = f"{trunk}-block-{rank}"
        source = make_tiny_hf(folder / f"{name}-source", trunk, **sizes_of(trunk))
        made["drafter", trunk, rank] = exported(add_drafter(source, [1, 2, 3], 2, rank), folder / name, mesh)
    # SGLang's Qwen2 does not return the states.
    source = make_tiny_hf(folder / "qwen2-block-source", "qwen2", **sizes_of("qwen2"))
    made["no states"] = exported(add_drafter(source, [1, 2, 3]), folder / "qwen2-block", mesh)
    plain = make_tiny_hf(folder / "unquantized", "qwen3", depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    for heads in ("keep", "block"):
        made["nvfp4", heads] = folder / f"nvfp4-{heads}"
        args = ExportArgs(model=str(plain), quant_method="nvfp4", quant_heads=heads)
        convert(replace(args, output_dir=str(made["nvfp4", heads])), mesh)
    return made


def with_assistant(trunk: Path) -> Path:
    """Add an assistant in a folder to a published trunk of Gemma 4; return the directory."""
    make_assistant(trunk / DRAFT_FOLDER, trunk)
    settings = settings_of(trunk)
    sources = dict(zip(settings["layer_types"], key_layers(settings), strict=True))
    return declare(trunk, config_for(settings).to_dict(), sorted(sources.values()))


def listed_modules(folder: Path) -> list[tuple[dict[str, Any], str, bool]]:
    """Return lists, modules, and whether the rules find the module in the list.

    These are all modules in decoder layers of heads except experts, of all families, with plain and quantized heads.
    """
    found = []
    for family in CLASSES:
        model = resolve_served(make_tiny_hf(folder / family, family, 1))
        known = CONVENTIONS["sglang"](model.family)
        for keeps_block, (method, without) in product((False, True), METHODS.items()):
            unlisted = unlisted_engines(method, model.family, model.config, keeps_block=keeps_block)
            if known is None or "sglang" in unlisted:
                continue
            given = Quantization({"quant_method": method, **without})
            listed = with_heads_kept(given, model.family, model.config, keeps_block=keeps_block)
            for module in modules_of(known, head_modules(model.family, model.config, 0), model.config, 0):
                if ".experts" not in module.name:
                    is_listed = not builds_quantized(listed, MATCHINGS["sglang"], module, {})
                    found.append((listed.content, module.name, is_listed))
    return found


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> list[tuple[dict[str, Any], str, bool]]:
    return listed_modules(tmp_path_factory.mktemp("listed"))


@pytest.fixture(scope="module")
def reports(models, cases) -> dict[Any, Any]:
    """Return SGLang's report of each model, as "matches" which modules of `cases` it finds in their lists, and as
    "filtered" the distributions with FILTERS and with TWO_FILTERS.
    """
    asked: dict[Any, Any] = {"matches": (f"{IN_SGLANG}:matches", [case[:2] for case in cases], FUSED)}
    requests = [sampling_params(Sampling(8, temperature=1.0, **each), 0, 8) for each in (*FILTERS, TWO_FILTERS)]
    asked["filtered"] = (f"{IN_SGLANG}:filtered", requests, LOGITS.softmax(-1).tolist())
    asked |= {name: directory for name, directory in models.items() if name[0] != "nvfp4"}
    asked["a GPU"] = (f"{IN_SGLANG}:claim_a_gpu",)
    return dry_loads("sglang", asked | models)


# SGLang's lines of these families are not vLLM's, for which heads are trained where nobody says otherwise.
FED_OTHERWISE = ("mimo", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "kimi_k2", "hy_v3")


@pytest.mark.parametrize(
    ("family", "depth"), some_of(WHOLE, *(case for case in WHOLE if case[1] or case[0] in WITHOUT_HEADS))
)
def test_a_whole_checkpoint_passes(reports, family, depth):
    report = reports[family, depth]
    assert report.problems == []
    assert mention_each(report.notes, ["SGLang --draft_for"] * (depth == 1 and family in FED_OTHERWISE))
    assert report.draft == (convention("sglang", family).draft if depth else None)
    assert (report.num_mtp_heads, report.num_drafting) == (depth, depth)
    assert report.target


@pytest.mark.parametrize("family", DSA)
def test_sparse_attention_requires_a_gpu(reports, family):
    (problem,) = reports[family].problems
    assert mentions(problem, "SGLang CUDA") or mentions(problem, "SGLang NVIDIA")


@pytest.mark.parametrize("family", COMMON_WINDOW)
def test_a_window_that_sglang_ignores_is_refused(reports, family):
    (problem,) = reports[family, "window"].problems
    assert mentions(problem, "sliding_window 8 --max_model_len 8")


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_model_is_whole(reports, model):
    assert reports[model].problems == []


@pytest.mark.parametrize("model", ASSISTED)
def test_an_assistant_is_whole(reports, model):
    report = reports[model, "assistant"]
    assert (report.problems, report.draft, report.num_drafting) == ([], ASSISTED[model], 1)


def test_a_missing_tensor_of_an_assistant_is_named(reports):
    (problem,) = reports["incomplete assistant"].problems
    assert mentions(problem, "mtp.assistant.model.layers.0.self_attn.q_proj.weight")


def test_heads_without_experts_are_whole(reports):
    report = reports["dense Nemotron-H"]
    assert (report.problems, report.draft) == ([], "NemotronHForCausalLMMTP")


@pytest.mark.parametrize("family", some_of(BROKEN_FAMILIES, *BROKEN_DAILY))
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_found(reports, family, name):
    assert reports[family, name].problems


@pytest.mark.parametrize("name", ["no projection"])
@pytest.mark.parametrize("family", some_of(["mimo", "glm4_moe", "deepseek_v3"], "mimo"))
def test_numbers_that_sglang_would_leave_random_are_counted(reports, family, name):
    """SGLang's own classes load whatever they find; classes of swiftlite's plugin raise an error."""
    draft = convention("sglang", family).draft
    (problem,) = reports[family, name].problems
    assert mentions(problem, f"{draft} {64 * 128}")
    assert problem.split(".")[-2:] == [projection(family).split(".")[-2], "weight"]


@pytest.mark.parametrize(
    ("family", "name", "words"),
    daily_if_broken(
        ("mimo", "extra head", "MiMoMTP model.mtp_layers.0.final_layernorm.weight"),
        ("mimo", "promises too much", "SGLang MiMoMTP 2"),
        ("mimo", "promises nothing", "SGLang model.mtp_layers.0.final_layernorm.weight"),
        ("glm4_moe", "extra head", "SGLang model.layers.3.eh_proj.weight"),
        ("glm4_moe", "promises too much", "SGLang 2"),
        ("deepseek_v3", "promises too much", "SGLang 2"),
        ("qwen3", "no projection", "mtp.fc.weight"),
        ("qwen3", "renamed", "mtp.projection.weight"),
        ("qwen3", "extra head", "mtp.heads.1.fc.weight"),
        ("qwen3", "promises too much", "SGLang 2"),
        ("qwen3", "promises too much", "config.json 2"),
        ("qwen3", "promises nothing", "Qwen3ForCausalLM KeyError"),
        ("deepseek_v3", "wrong shape", "DeepseekV3ForCausalLMNextN"),
    ),
)
def test_the_report_names_what_is_wrong(reports, family, name, words):
    assert mentions("\n".join(reports[family, name].problems), words)


@pytest.mark.parametrize(("trunk", "rank"), some_of(BLOCKS, ("llama", 0), ("qwen3", 8)))
def test_a_block_drafter_is_whole_but_requires_a_gpu(reports, trunk, rank):
    report = reports["drafter", trunk, rank]
    assert report.draft == ("Qwen3DSparkModel" if rank else "DFlashDraftModel")
    (problem,) = report.problems
    assert mentions(problem, f"SGLang {'dspark' if rank else 'dflash'} GPU")


def test_a_trunk_that_does_not_return_the_states_of_a_drafter(reports):
    by_rule, by_class = reports["no states"].problems
    assert mentions(by_rule, "SGLang dflash qwen2 llama")
    assert mentions(by_class, "Qwen2ForCausalLM dflash")


def test_a_target_that_drafts_for_itself(reports):
    problems = "\n".join(reports["itself"].problems)
    assert mentions(problems, "InternLM3ForCausalLM")


@pytest.mark.parametrize(
    ("family", "block"), some_of(QUANTIZED_CASES, *product(("qwen3", "glm4_moe"), (False, True)), ("mimo", True))
)
def test_modules_are_built_as_the_files_have_them(reports, models, family, block):
    name = (family, "block" if block else "plain")
    assert reports[name].problems == []
    quantized, _, plain = reports[name].draft_modules.partition("plain: ")
    assert ("o_proj" in quantized) is block
    assert ("o_proj" in plain) is not block
    assert quantized_head_problems(resolve_served(models[name]), ["sglang"]) == []


@pytest.mark.parametrize("heads", ["keep", "block"])
def test_modules_in_nvfp4_are_built_as_the_files_have_them(reports, heads):
    """SGLang computes NVFP4 on GPUs only; a dry load runs no kernel."""
    report = reports["nvfp4", heads]
    assert report.problems == []
    quantized, _, plain = report.draft_modules.partition("plain: ")
    assert ("o_proj" in quantized) is (heads == "block")
    assert ("o_proj" in plain) is (heads == "keep")
    assert "fc" in plain


def test_a_missing_list_is_reported(reports, models):
    assert reports["without a list"].problems
    assert quantized_head_problems(resolve_served(models["without a list"]), ["sglang"])


def test_filters_mean_to_sglang_what_the_options_say(reports):
    *singles, both = reports["filtered"]
    for filters, found in zip(FILTERS, singles, strict=True):
        expected = filtered(LOGITS[None], [[]], **filters)[0]
        assert found == pytest.approx(expected.tolist(), abs=1e-6), filters
        assert (0.0 in found) is bool(filters)
    # Top-p counts the probabilities before top-k: its share is that of all tokens, not of those that top-k has left.
    assert filtered(LOGITS[None], [[]], **TWO_FILTERS)[0].count_nonzero() == 3
    assert both == pytest.approx(filtered(LOGITS[None], [[]], top_k=4)[0].tolist(), abs=1e-6)


def test_lists_mean_to_sglang_what_the_rules_say(reports, cases):
    expected = [is_listed for _, _, is_listed in cases]
    assert reports["matches"] == expected
    assert set(expected) == {False, True}


@pytest.mark.parametrize("family", WITHOUT_SCALES)
def test_scales_that_sglang_does_not_read_are_reported(reports, family):
    """SGLang's class for Llama and Mistral renames `weight_scale_inv`, and finds no parameter with the new name. It
    reports neither this nor the uninitialized scales."""
    assert any("self_attn.qkv_proj.weight_scale_inv" in line for line in reports[family, "block"].problems)
