"""Test `doctor --engine sglang`. One process with SGLang loads all checkpoints of this file."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from swiftlite.engines.loading.load_report import LoadReport
from tests.engines.broken import BROKEN, BROKEN_FAMILIES, damage, make, projection
from tests.engines.dry_loads import dry_loads
from tests.engines.reference import convention
from tests.messages import mention_each, mentions
from tests.published import library
from tests.tiny import CLASSES, DSA, HYBRID, ONLY_IN_VLLM

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
# SGLang keeps states of linear attention and indexers on GPUs alone ("extra_buffer requires platform support"), and
# neither SGLang nor the plugin has a draft for heads of the others.
LOADABLE = [family for family in CLASSES if family not in (*DSA, *HYBRID, *ONLY_IN_VLLM)]
COMMON_WINDOW = ("mistral", "phi3")
"""Families whose layers all have the same window, which SGLang ignores."""
WHOLE = [(family, depth) for family in LOADABLE for depth in (0, 1)]

PUBLISHED = ("Llama-3.1-8B", "Qwen3-8B-FP8", "DeepSeek-V3", "EXAONE-4.0-1.2B", "EXAONE-4.0-32B")
"""Shapes of published models: a padded vocabulary, FP8 with both types of scales, and windows in no or some layers."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[Any, LoadReport]:
    folder = tmp_path_factory.mktemp("models")
    asked: dict[Any, Path] = {}
    for family, depth in WHOLE:
        asked[family, depth] = make(folder / f"{family}-{depth}", family, depth)
    for model in PUBLISHED:
        asked[model] = library.build(folder / model, model)
    for family in BROKEN_FAMILIES:
        for number, (name, (depth, promised, change)) in enumerate(BROKEN.items()):
            asked[family, name] = make(folder / f"{family}-broken-{number}", family, depth)
            damage(asked[family, name], family, promised, change)
    # SGLang's InternLM3 is a Llama by another name, for which neither SGLang nor the plugin has a draft.
    asked["itself"] = make(folder / "itself", "llama", 0)
    damage(asked["itself"], "llama", 1, None, architectures=["InternLM3ForCausalLM"])
    for family in DSA:
        asked[family] = make(folder / family, family, 1)
    for family in COMMON_WINDOW:
        asked[family, "window"] = make(folder / f"{family}-window", family, 0)
        damage(asked[family, "window"], family, 0, None, sliding_window=8)
    return dry_loads("sglang", asked, timeout=1200)


# SGLang's lines of these families are not vLLM's, for which heads are trained where nobody says otherwise.
FED_OTHERWISE = ("mimo", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "hy_v3")


@pytest.mark.parametrize(("family", "depth"), WHOLE)
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


@pytest.mark.parametrize("family", BROKEN_FAMILIES)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_found(reports, family, name):
    assert reports[family, name].problems


@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "deepseek_v3"])
def test_numbers_that_sglang_would_leave_random_are_counted(reports, family):
    """SGLang's own classes load whatever they find; classes of swiftlite's plugin raise an error."""
    draft = convention("sglang", family).draft
    (problem,) = reports[family, "no projection"].problems
    assert mentions(problem, f"{draft} {64 * 128}")
    assert problem.split(".")[-2:] == [projection(family).split(".")[-2], "weight"]


@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
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
    ],
)
def test_the_report_names_what_is_wrong(reports, family, name, words):
    assert mentions("\n".join(reports[family, name].problems), words)


def test_a_target_that_drafts_for_itself(reports):
    problems = "\n".join(reports["itself"].problems)
    assert mentions(problems, "InternLM3ForCausalLM")
