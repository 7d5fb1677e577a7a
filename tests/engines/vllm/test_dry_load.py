"""Test vLLM's own loaders: `doctor --engine` with tiny models and every published configuration, and that vLLM builds
each module of quantized heads as the files have it; and the known facts about SGLang's classes.

One process with vLLM loads all checkpoints of this file. Some models receive new weights as a running engine does.
"""

import importlib.util
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite.args.commands import DoctorArgs
from swiftlite.base.errors import UserError
from swiftlite.cli import doctor
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.index import ENGINES
from swiftlite.engines.info import EngineInfo
from swiftlite.engines.loading.dry_load import dry_load
from swiftlite.engines.loading.load_report import LoadReport
from swiftlite.engines.quantized_heads import quantized_head_problems
from swiftlite.engines.served_model import resolve_served
from tests.engines.broken import (
    BROKEN,
    BROKEN_DAILY,
    BROKEN_FAMILIES,
    daily_if_broken,
    make,
    projection,
    write_broken,
)
from tests.engines.dry_loads import dry_loads
from tests.engines.quantized_lists import change_quantization, list_plain, list_trunk
from tests.engines.reference import convention
from tests.messages import has_line, mention_each, mentions, naming
from tests.published import library
from tests.quantized import quantize_hf
from tests.tiers import selected, some_of
from tests.tiny import (
    CLASSES,
    DSA,
    HYBRID,
    LATENT,
    ONLY_IN_TRANSFORMERS,
    VLLM_LATENT_SIZES,
    VLLM_VALUE_SIZES,
    WITHOUT_GATES,
    WRAPPED,
    make_tiny_hf,
    make_tiny_vision_hf,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
# Models with a vision tower are loaded below. vLLM has indexers on GPUs only.
LOADABLE = [
    family for family in CLASSES if family not in (*WRAPPED, *DSA, *WITHOUT_GATES) and not family.startswith("qwen3_5")
]
WHOLE = [(family, depth) for family in LOADABLE for depth in (0, 1)] + [("mimo", 2), ("qwen2", 2)]
# The published configurations have every trunk, and heads of the families that are published with heads. Here are heads
# of the other families, and two heads.
DAILY = [(family, 1) for family in LOADABLE if family not in library.HEADS] + [("mimo", 1), ("mimo", 2), ("qwen2", 2)]
SERVED_OTHERWISE = (("mimo", 1), ("qwen3", 0), ("qwen3", 1), ("qwen2", 2))
"""Models that other tests load too."""


WITH_IMAGES = ("qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
# vLLM's kernels for MXFP4 do not support every CPU, and vLLM chooses one while it builds the model. It has indexers and
# limits of experts on GPUs only, and experts without gates.
ON_GPUS = (*DSA, "step3p5", *WITHOUT_GATES)
# vLLM has no draft class for heads of ONLY_IN_TRANSFORMERS, and its classes of these models require further packages.
NOT_HERE = (*ON_GPUS, *ONLY_IN_TRANSFORMERS)
PUBLISHED = [m for m in library.MODELS if not library.is_in_mxfp4(m) and library.family(m) not in NOT_HERE]
RELOADED = ["Llama-3.1-8B", "Qwen3.5-27B", "Qwen3.6-35B-A3B"]
"""Models that receive new weights: one has a padded vocabulary, and two have a vision tower that is not transferred."""
IN_VLLM = "tests.engines.vllm.in_vllm"


def without_text_config(directory: Path) -> Path:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    path.write_text(json.dumps({**text, **config}))
    return directory


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
GEMMA = {"gemma3": "gemma-3-27b-it", "gemma4": "gemma-4-26B-A4B-it", "gemma4_unified": "gemma-4-12B-it"}
"""Published models, which get a head, of families whose towers vLLM builds from their config."""
# Stacks of gpt-oss are only stored in MXFP4. vLLM has indexers on GPUs only, and requires a kernel for experts of
# Qwen3-VL even if the list excludes them. The tower of a tiny Gemma 3 or 4 is not one.
NOT_QUANTIZED = (*GEMMA, "gpt_oss", "qwen3_vl_moe", *DSA, *WITHOUT_GATES, *ONLY_IN_TRANSFORMERS)
QUANTIZED_CASES = [
    *product(
        [family for family in CLASSES if family not in NOT_QUANTIZED],
        ("int8", "int4"),
        (False, True),
    ),
    *product(OF_BLOCKS, ("fp8_blocks_128",), (False, True)),
    *product(WITHOUT_EXPERTS, ("awq", "nvfp4", "modelopt_fp8"), (False, True)),
    *product(WITHOUT_EXPERTS, ("gptq",), (False,)),
    *product(("qwen3", "llama"), ("gptq",), (True,)),
]
# vLLM builds `o_proj` in heads of MiMo-V2-Flash always plain.
QUANTIZED_CASES = [case for case in QUANTIZED_CASES if (case[0], case[2]) != ("mimo_v2_flash", True)]
# vLLM's draft class for Step-3.5 requires scales of a KV cache in every quantized checkpoint.
QUANTIZED_CASES = [case for case in QUANTIZED_CASES if case[0] != "step3p5"]
"""Family, format, and whether the decoder layer of the head is quantized. vLLM has no kernel for experts in 4 bits or
int8 on a CPU.
"""
# Each of vLLM's names, ours, and a wrapper of a vision-language model
FIRST = ("qwen3", "qwen3_moe", "mimo", "glm4_moe", "deepseek_v3", "hy_v3", "qwen3_next", "qwen3_5")
CHOSEN = some_of(
    QUANTIZED_CASES,
    *((family, "int8", bool(number % 2)) for number, family in enumerate(FIRST)),
    *product(("deepseek_v3", "qwen3_next"), ("fp8_blocks_128",), (False,)),
    ("qwen3", "int4", True),
    ("qwen3", "nvfp4", False),
    ("qwen3_5_text", "nvfp4", True),
    ("mimo", "awq", False),
    ("qwen3", "modelopt_fp8", True),
    ("mimo", "modelopt_fp8", False),
    *product(("qwen3",), ("gptq",), (False, True)),
)


def make_quantized_source(directory: Path, family: str, name: str) -> Path:
    sizes: dict[str, Any] = {}
    if name == "fp8_blocks_128":
        sizes = OF_BLOCKS[family]
    elif family in LATENT:
        sizes = SMALL
    elif family == "mimo_v2_flash":
        sizes = VLLM_VALUE_SIZES
    elif family in HYBRID:  # outputs that AWQ's format can pack
        sizes = {"linear_num_key_heads": 8, "linear_num_value_heads": 32}
    write = make_tiny_vision_hf if family in WRAPPED else make_tiny_hf
    return write(directory, family, 1, dtype=torch.bfloat16, **sizes)


def make_quantized(directory: Path, family: str, name: str, block: bool) -> Path:
    source = make_quantized_source(directory / "source", family, name)
    experts = name == "fp8_blocks_128"
    ignore = ["lm_head"] if name == "modelopt_fp8" else []  # ModelOpt lists it, and vLLM would build it quantized
    model = quantize_hf(source, directory / "model", name, block=block, experts=experts, ignore=ignore)
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
def quantized(request, tmp_path_factory) -> dict[Any, Path]:
    """Return the quantized models of the cases that run in this session, and those with wrong lists."""
    folder = tmp_path_factory.mktemp("quantized")
    made = {}
    for case in selected(request, "family", "name", "block"):
        made[case] = make_quantized(folder / "-".join(map(str, case)), *case)
    for family, change in {**WRONG, "qwen3": list_trunk}.items():
        made[family, "wrong list"] = make_quantized(folder / f"{family}-wrong", family, "int8", block=False)
        change(made[family, "wrong list"])
    return made


@pytest.fixture(scope="module")
def published(request, tmp_path_factory) -> dict[Any, Any]:
    """Return what is asked of published models: a report by model, and the result of `reload` by model and "reload"."""
    folder = tmp_path_factory.mktemp("published")
    asked: dict[Any, Any] = {"FP8": (f"{IN_VLLM}:support_fp8",)}
    asked |= {model: library.build(folder / model, model) for model in selected(request, "model")}
    reloads = {(model, "reload"): (f"{IN_VLLM}:reload", str(asked[model])) for model in RELOADED if model in asked}
    return asked | reloads


@pytest.fixture(scope="module")
def reports(request, quantized, published, tmp_path_factory) -> dict[Any, Any]:
    folder = tmp_path_factory.mktemp("models")
    asked: dict[Any, Any] = {}
    needed = {*selected(request, "family", "depth"), *SERVED_OTHERWISE}
    for family, depth in [case for case in WHOLE if case in needed]:
        asked[family, depth] = make(folder / f"{family}-{depth}", family, depth)
    for family in WITH_IMAGES:
        asked[family, 1] = make_tiny_vision_hf(folder / family, family, 1)
    for family, model in GEMMA.items():
        asked[family, 1] = library.build(folder / family, model, has_new_head=True)
    asked["flat"] = without_text_config(make_tiny_vision_hf(folder / "flat", "qwen2_5_vl", 1, tied=True))
    for family in ("qwen2_moe", "qwen3_moe"):
        asked[family, "dense head"] = make(folder / f"{family}-dense-head", family, 1, mlp_only_layers=[1])
    asked["tied"] = make(folder / "tied", "llama", 1, tied=True)
    for family in DSA:
        asked[family] = make(folder / family, family, 1)
    for family, name in {("mimo", "no projection"), *selected(request, "family", "name")}:
        if name in BROKEN:
            asked[family, name] = write_broken(folder, family, name)
    asked |= {"self": asked["qwen3", 0], "two steps": asked["qwen2", 2], "unknown option": asked["mimo", 1]}
    itself = {"method": "draft_model", "model": str(asked["self"]), "num_speculative_tokens": 1}
    options: dict[Any, dict[str, Any]] = {
        "self": {"speculative_config": itself},
        "two steps": {"num_speculative_tokens": 2},
        "unknown option": {"engine_kwargs": {"max_modle_len": 3}},
    }
    asked["NVFP4"] = (f"{IN_VLLM}:support_nvfp4",)
    # The published ones last: the others are built without kernels for FP8.
    return dry_loads("vllm", asked | quantized | published, options)


@pytest.mark.parametrize(("family", "depth"), some_of(WHOLE, *DAILY))
def test_a_whole_checkpoint_passes(reports, family, depth):
    report = reports[family, depth]
    assert report.problems == []
    assert report.notes == []
    assert report.draft == (convention("vllm", family).draft if depth else None)
    assert (report.num_mtp_heads, report.num_drafting) == (depth, min(depth, 1))  # on a CPU the first head drafts alone
    assert report.target


@pytest.mark.parametrize("model", some_of(PUBLISHED, *(model for model in PUBLISHED if model in library.CHOSEN)))
def test_vllm_loads_it_whole(reports, model):
    report, family = reports[model], library.family(model)
    assert report.problems == []
    assert report.notes == []
    depth = int(family in library.HEADS)
    assert (report.num_mtp_heads, report.num_drafting) == (depth, depth)
    assert report.draft == (convention("vllm", family).draft if depth else None)


@pytest.mark.parametrize("model", RELOADED)
def test_live_weights_fill_all_that_is_trained(reports, model):
    found = reports[model, "reload"]
    assert found["problems"] == ""
    assert found["changed"] == []
    has_tower = any(name.startswith("visual.") for name in found["parameters"])
    assert has_tower is model.startswith("Qwen3.")


def test_a_tied_model_passes(reports):
    assert reports["tied"].problems == []


@pytest.mark.parametrize("family", DSA)
def test_sparse_attention_requires_a_gpu(reports, family):
    (problem,) = reports[family].problems
    assert mentions(problem, "Sparse CPU")


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_heads_have_the_kind_of_the_last_layer(reports, family):
    """The heads have other numbers than the trunk's layers, so vLLM reads their kind from the draft's config."""
    assert reports[family, "dense head"].problems == []


@pytest.mark.parametrize("family", [*WITH_IMAGES, *GEMMA])
def test_heads_of_models_with_images_pass(reports, family):
    report = reports[family, 1]
    assert (report.problems, report.notes) == ([], [])
    assert report.draft == convention("vllm", family).draft
    assert report.sees_images is True
    assert reports["qwen3", 1].sees_images is None


def test_settings_without_text_config(reports):
    """The config.json of the published Qwen2.5-VL has no text_config."""
    assert reports["flat"].problems == []
    assert reports["flat"].draft == convention("vllm", "qwen2_5_vl").draft


@pytest.mark.parametrize(("sees_images", "words"), [(True, "images features"), (False, "images placeholders")])
def test_doctor_tells_what_drafts_read_at_images(tmp_path, capsys, monkeypatch, reports, sees_images, words):
    report = replace(reports["qwen3_vl", 1], sees_images=sees_images)
    monkeypatch.setattr("swiftlite.engines.loading.dry_load.dry_load", lambda info, config: report)
    doctor.run(DoctorArgs(model=str(make(tmp_path / "model", "mimo", 1)), engine="vllm"))
    assert has_line(capsys.readouterr().out, words)


@pytest.mark.parametrize("family", some_of(BROKEN_FAMILIES, *BROKEN_DAILY))
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_found(reports, family, name):
    assert reports[family, name].problems


@pytest.mark.parametrize("name", ["no projection"])
@pytest.mark.parametrize("family", some_of(["mimo", "glm4_moe", "deepseek_v3"], "mimo"))
def test_numbers_that_vllm_would_leave_random_are_counted(reports, family, name):
    """vLLM's own classes do not report missing tensors. Classes of swiftlite's plugin raise an error."""
    draft = convention("vllm", family).draft
    (problem,) = reports[family, name].problems
    assert mentions(problem, f"{draft} {64 * 128}")
    assert problem.split(".")[-2:] == [projection(family).split(".")[-2], "weight"]


@pytest.mark.parametrize(
    ("family", "name", "words"),
    daily_if_broken(
        ("qwen3", "no projection", "mtp.fc.weight"),
        ("qwen3", "renamed", "mtp.projection.weight"),
        ("qwen3", "extra head", "mtp.heads.1.fc.weight"),
        ("qwen3", "promises too much", "mtp.heads.1.fc.weight"),
        ("glm4_moe", "renamed", "KeyError 'model.layers.2.mtp_block.projection.weight'"),
        ("glm4_moe", "promises too much", str(64 * 128)),
        ("deepseek_v3", "promises too much", "DeepSeekMTP"),
        ("mimo", "promises nothing", "vLLM model.mtp_layers.0.final_layernorm.weight"),
        ("mimo", "wrong shape", "[64, 64]"),
    ),
)
def test_the_report_names_what_is_wrong(reports, family, name, words):
    assert mentions("\n".join(reports[family, name].problems), words)


def test_a_target_that_drafts_for_itself(reports):
    (problem,) = reports["self"].problems
    assert mentions(problem, "Qwen3ForCausalLM")


def test_a_step_that_no_head_was_trained_for(reports):
    report = reports["two steps"]
    assert report.draft == "Qwen2MTPModel"
    assert mention_each(report.problems, ["num_speculative_tokens 2 1"])


def test_an_option_that_vllm_does_not_know(reports):
    (problem,) = reports["unknown option"].problems
    assert mentions(problem, "vLLM TypeError max_modle_len")


def test_doctor_ends_with_what_the_engine_says(tmp_path, capsys, monkeypatch, reports):
    """tests/e2e/test_current_directory.py runs the subprocess of `doctor`."""
    monkeypatch.setattr("swiftlite.engines.loading.dry_load.dry_load", lambda *_: reports["mimo", "no projection"])
    assert doctor.run(DoctorArgs(model=str(make(tmp_path / "model", "mimo", 1)), engine="vllm")) == 1
    report = capsys.readouterr().out
    assert has_line(report, "MiMoMTP 1")
    assert has_line(report, "MiMoMTP 8192 model.mtp_layers.2.input_proj.weight")


def test_doctor_ends_well_when_the_engine_would_serve_it_right(tmp_path, capsys, monkeypatch, reports):
    directory = make(tmp_path / "model", "mimo", 1)
    asked = []

    def answer(info: EngineInfo, config: EngineConfig) -> LoadReport:
        asked.append((info.name, config))
        return reports["mimo", 1]

    monkeypatch.setattr("swiftlite.engines.loading.dry_load.dry_load", answer)
    kwargs = {"max_num_seqs": 2}
    args = DoctorArgs(model=str(directory), engine="vllm", num_speculative_tokens=3, vllm_engine_kwargs=kwargs)
    assert doctor.run(args) == 0
    assert asked == [("vllm", EngineConfig(resolve_served(directory), num_speculative_tokens=3, engine_kwargs=kwargs))]
    assert reports["mimo", 1].verdict in capsys.readouterr().out


def test_a_vllm_that_does_not_run_here_is_told(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho ImportError: libcuda.so.1 >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UserError, match=naming("vLLM ImportError: libcuda.so.1")):
        dry_load(ENGINES["vllm"], EngineConfig(resolve_served(make(tmp_path / "model", "mimo", 1))))


@pytest.mark.parametrize(
    ("family", "depth"),
    [("mimo", 1), ("mimo", 2), ("glm4_moe", 1), ("glm4_moe", 2), ("qwen3", 1), ("qwen3", 2), ("qwen3", 0)],
)
def test_what_is_known_of_sglang_without_it(tmp_path, monkeypatch, family, depth):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = dry_load(ENGINES["sglang"], EngineConfig(resolve_served(make(tmp_path, family, depth))))
    assert mentions(report.engine, "sglang loaders not")
    assert mention_each(report.problems, [f"{report.draft} 2"] * (depth == 2))


@pytest.mark.parametrize(("family", "name", "block"), CHOSEN)
def test_modules_are_built_as_the_files_have_them(reports, quantized, family, name, block):
    report = reports[family, name, block]
    if name == "fp8_blocks_128" and not torch.cpu._is_amx_tile_supported():
        assert len(report.problems) == 1  # vLLM 0.32 has no other kernel for blocks on a CPU
        assert "AMX" in report.problems[0]
        return
    assert report.problems == []
    in_codes, _, plain = report.draft_modules.partition("plain: ")
    assert ("o_proj" in in_codes) is block
    assert ("o_proj" in plain) is not block
    assert quantized_head_problems(resolve_served(quantized[family, name, block]), ["vllm"]) == []


@pytest.mark.parametrize("family", WRONG)
def test_a_wrong_list_is_reported(reports, quantized, family):
    """vLLM loads the plain tensors into quantized modules without an error."""
    report = reports[family, "wrong list"]
    predicted = quantized_head_problems(resolve_served(quantized[family, "wrong list"]), ["vllm"])
    assert predicted
    for problem in predicted:
        tensor = problem.partition(" ")[0]
        assert any(line.startswith(f"{tensor} is bfloat16") and "int8" in line for line in report.problems)
    assert any("weight_scale" in line and "uninitialized" in line for line in report.problems)


def test_the_classes_of_the_plugin_require_every_scale(reports, quantized):
    """swiftlite's draft classes stop if a parameter has no tensor; vLLM's own continue."""
    report = reports["qwen3", "wrong list"]
    assert report.draft is None
    assert any("missing: mtp.layers.0.mlp.down_proj.weight_scale" in line for line in report.problems)
    assert quantized_head_problems(resolve_served(quantized["qwen3", "wrong list"]), ["vllm"])
