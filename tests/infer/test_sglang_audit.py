"""The doctor's look at a checkpoint through SGLang's own loaders; one process of SGLang's audits all of this file."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swiftlite.families.conventions import CONVENTIONS
from swiftlite.infer.engine_audit import EngineReport
from tests.infer.broken import BROKEN, damage, make, projection
from tests.stand_ins import sglang_environment

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
AUDIT_ALL = """
import dataclasses, json, sys
from pathlib import Path
from swiftlite.infer.engine import EngineConfig
from swiftlite.infer.sglang_audit import audit
for directory, options in json.loads(sys.argv[1]):
    report = audit(EngineConfig(Path(directory), **{"num_speculative_tokens": None, **options}))
    print(json.dumps(dataclasses.asdict(report)))
"""
BROKEN_FAMILIES = ("mimo", "glm4_moe", "deepseek_v3")
WHOLE = [(family, depth) for family in (*BROKEN_FAMILIES, "qwen3_moe") for depth in (0, 1)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[Any, EngineReport]:
    folder = tmp_path_factory.mktemp("models")
    asked: dict[Any, Path] = {}
    for family, depth in WHOLE:
        asked[family, depth] = make(folder / f"{family}-{depth}", family, depth)
    for family in BROKEN_FAMILIES:
        for number, (name, (depth, promised, change)) in enumerate(BROKEN.items()):
            asked[family, name] = make(folder / f"{family}-broken-{number}", family, depth)
            damage(asked[family, name], family, promised, change)
    asked["qwen3", 0] = make(folder / "qwen3-0", "qwen3", 0)
    asked["qwen3", 1] = make(folder / "qwen3-1", "qwen3", 1)
    asked["itself"] = make(folder / "itself", "qwen3", 0)
    damage(asked["itself"], "qwen3", 1, None)

    questions = json.dumps([(str(directory), {}) for directory in asked.values()])
    command = [sys.executable, "-c", AUDIT_ALL, questions]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=sglang_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    return {name: EngineReport(**line) for name, line in zip(asked, lines, strict=True)}


@pytest.mark.parametrize(("family", "depth"), [*WHOLE, ("qwen3", 0)])
def test_a_whole_checkpoint_passes(reports, family, depth):
    report = reports[family, depth]
    assert report.problems == []
    assert report.notes == []
    assert report.draft == (CONVENTIONS["sglang"][family].draft if depth else None)
    assert (report.depth, report.num_heads) == (depth, depth)
    assert report.target


@pytest.mark.parametrize("family", BROKEN_FAMILIES)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_found(reports, family, name):
    assert reports[family, name].problems


@pytest.mark.parametrize("family", BROKEN_FAMILIES)
def test_numbers_that_sglang_would_leave_random_are_counted(reports, family):
    draft = CONVENTIONS["sglang"][family].draft
    (problem,) = reports[family, "no projection"].problems
    assert problem.startswith(f"{draft} is left with {64 * 128} random numbers in model.")
    assert problem.split(".")[-2:] == [projection(family).split(".")[-2], "weight"]


@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        ("mimo", "extra head", "MiMoMTP loads another tensor over model.mtp_layers.0.final_layernorm.weight"),
        ("mimo", "promises too much", "loads all 2 MTP heads into one place"),
        ("mimo", "promises nothing", "no class of SGLang reads model.mtp_layers.0.final_layernorm.weight"),
        ("glm4_moe", "extra head", "no class of SGLang reads model.layers.3."),
        ("glm4_moe", "promises too much", "refuses a checkpoint with 2 MTP heads"),
        ("deepseek_v3", "promises too much", "refuses a checkpoint with 2 MTP heads"),
        ("deepseek_v3", "wrong shape", "DeepseekV3ForCausalLMNextN stops at the checkpoint"),
    ],
)
def test_the_report_names_what_is_wrong(reports, family, name, words):
    assert words in "\n".join(reports[family, name].problems)


def test_a_target_that_drafts_for_itself(reports):
    problems = "\n".join(reports["itself"].problems)
    assert "the target drafts for itself: the draft is another Qwen3ForCausalLM" in problems


def test_a_family_without_a_class_does_not_load(reports):
    """With its heads in the files, not even the target alone does."""
    assert "Qwen3ForCausalLM stops at the checkpoint: KeyError: 'mtp." in reports["qwen3", 1].problems[0]
