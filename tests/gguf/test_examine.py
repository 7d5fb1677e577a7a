"""Test that the reasons why llama.cpp would accept no drafts are found in a file of any origin."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from swiftlite.base.errors import UserError
from swiftlite.cli.main import main
from swiftlite.engines.llamacpp.dry_load import report_of
from swiftlite.engines.llamacpp.program import program
from swiftlite.families.resolved import resolve
from swiftlite.gguf.examine import Examined, examine
from swiftlite.gguf.write import write_gguf
from tests.gguf.rewritten import rewrite
from tests.llamacpp_here import needs_llamacpp
from tests.messages import mentions, naming
from tests.tiny import make_tiny_hf

HEAD = "blk.2."
"""The trunk has two layers."""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Return files of a dense model and of a model with latent attention, each with one head."""
    folder = tmp_path_factory.mktemp("files")
    found = {}
    for family in ("qwen3", "deepseek_v3"):
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
        source = make_tiny_hf(folder / family, family, depth=1, with_tokenizer=True, **sizes)
        found[family] = folder / f"{family}.gguf"
        write_gguf(resolve(source), found[family], "f32")
    return found


def problems_of(file: Path) -> str:
    return "\n".join(examine(file).problems)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_file_of_swiftlite_has_no_problems(files, family, tmp_path):
    for file in (files[family], rewrite(files[family], tmp_path / "plain.gguf")):
        found = examine(file)
        assert isinstance(found, Examined)
        assert (found.problems, found.notes, found.heads) == ([], [], 1)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        (
            "qwen3",
            {"without": ("glm4moe.nextn_predict_layers",)},
            "blk.2.nextn.eh_proj.weight glm4moe.nextn_predict_layers",
        ),
        ("qwen3", {"without": (HEAD,)}, "glm4moe.block_count 3 heads"),
        ("qwen3", {"without": (f"{HEAD}nextn.enorm",)}, "blk.2.nextn.enorm.weight"),
        ("qwen3", {"without": (f"{HEAD}attn_k",)}, "blk.2.attn_k.weight"),
        ("qwen3", {"values": {"glm4moe.block_count": 4}}, "glm4moe.block_count 4"),
        ("qwen3", {"values": {"glm4moe.block_count": 2}}, "glm4moe.block_count 2"),
        ("qwen3", {"values": {"glm4moe.embedding_length": 32}}, "blk.2.nextn.eh_proj.weight"),
        ("deepseek_v3", {"without": ("deepseek2.expert_gating_func",)}, "deepseek2.expert_gating_func"),
    ],
)
def test_a_wrong_file_is_explained(files, tmp_path, family, changes, named):
    assert mentions(problems_of(rewrite(files[family], tmp_path / "wrong.gguf", **changes)), named)


def test_a_file_without_heads_is_explained(files, tmp_path):
    """What a converter that drops the heads writes."""
    left_out = (HEAD, "glm4moe.nextn_predict_layers")
    file = rewrite(files["qwen3"], tmp_path / "none.gguf", {"glm4moe.block_count": 2}, left_out)
    assert mentions(problems_of(file), "glm4moe.nextn_predict_layers")


def test_an_architecture_without_drafts_is_named(files, tmp_path):
    values = {"general.architecture": "llama", "llama.block_count": 3, "llama.nextn_predict_layers": 1}
    file = rewrite(files["qwen3"], tmp_path / "llama.gguf", values | {"llama.embedding_length": 64})
    assert mentions(problems_of(file), "'llama' glm4moe")


def test_a_part_of_a_file_is_named(files, tmp_path):
    file = rewrite(files["qwen3"], tmp_path / "part-00001-of-00002.gguf", {"split.count": 2})
    assert mentions(problems_of(file), "llama-gguf-split")


@needs_llamacpp
def test_doctor_examines_files_that_cannot_be_converted(files, tmp_path, capsys):
    values = {"general.architecture": "step35", "step35.block_count": 3, "step35.nextn_predict_layers": 1}
    file = rewrite(files["qwen3"], tmp_path / "step.gguf", values | {"step35.embedding_length": 64}, (f"{HEAD}nextn",))
    assert main(["doctor", "--engine", "llamacpp", "--model", str(file)]) == 1
    assert mentions(capsys.readouterr().out, "step35 blk.2.nextn.eh_proj.weight")


def test_two_heads_are_named(files, tmp_path):
    file = rewrite(files["qwen3"], tmp_path / "two.gguf", {"glm4moe.nextn_predict_layers": 2})
    assert mentions(problems_of(file), "2 'glm4moe'")


def test_a_coarse_head_is_noted(files, tmp_path):
    def types(name: str) -> GGMLQuantizationType | None:
        is_matrix = name.startswith(HEAD) and name.endswith(("attn_q.weight", "ffn_up_shexp.weight"))
        return GGMLQuantizationType.Q4_0 if is_matrix else None

    found = examine(rewrite(files["qwen3"], tmp_path / "coarse.gguf", types=types))
    assert found.problems == []
    assert mentions("\n".join(found.notes), "2 Q4_0 q8_0")
    assert found.types["heads"]["Q4_0"] == 2


@needs_llamacpp
@pytest.mark.parametrize(("release", "is_noted"), [("11549", False), ("12000", True)])
def test_another_release_than_the_measured_one_is_noted(files, tmp_path, monkeypatch, release, is_noted):
    """The real server behind a script that reports another release."""
    script = tmp_path / "llama-server"
    server = shlex.join(program() or [])
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec echo "version: {release} (1a2b3c4)"\nexec {server} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("LLAMA_SERVER", str(script))
    report = report_of(files["qwen3"])
    assert (report.engine, report.problems) == (f"llamacpp b{release}", [])
    assert [mentions(note, f"b11549 b{release}") for note in report.notes] == [True] * is_noted


@pytest.mark.parametrize("pre", ["default", None])
def test_an_unknown_pre_tokenizer_is_noted(files, tmp_path, pre):
    without = () if pre else ("tokenizer.ggml.pre",)
    values = {"tokenizer.ggml.pre": pre} if pre else {}
    found = examine(rewrite(files["qwen3"], tmp_path / "pre.gguf", values, without))
    assert mentions("\n".join(found.notes), "tokenizer.ggml.pre")


@pytest.mark.parametrize("size", [0, 10, 3000, -200])
def test_a_cut_file_is_named(files, tmp_path, size):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files["qwen3"].read_bytes()[:size])
    with pytest.raises(UserError, match=naming("cut.gguf")):
        examine(cut)
