"""Test `export --to_gguf`: from a run and from a model, checked by llama.cpp, whole or absent."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.export import gguf
from swiftlite.export.run import convert
from swiftlite.families.resolved import resolve
from swiftlite.gguf.examine import examine
from swiftlite.gguf.types import quantizer
from swiftlite.hub.gguf import gguf_model
from tests.engines.dflash_reference import add_drafter
from tests.llamacpp_here import needs_llamacpp
from tests.messages import mentions, naming
from tests.tiny import make_tiny_hf


@pytest.fixture
def hf_dir(tmp_path) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
    return make_tiny_hf(tmp_path / "hf", "qwen3", 1, dtype=torch.bfloat16, with_tokenizer=True, **sizes)


@pytest.fixture
def rows(tmp_path) -> Path:
    file = tmp_path / "val.jsonl"
    texts = ("What is 1 + 1?", "It's 12345 o'clock, isn't it?", "Größe: 你好 🙂")
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
    file.write_text("\n".join(lines) + "\n")
    return file


def options(model: Path, out: Path, **changes) -> ExportArgs:
    return ExportArgs(**{"model": str(model), "output_dir": str(out), "to_gguf": True} | changes)


@needs_llamacpp
def test_a_run_and_its_model_give_the_same_file(hf_dir, mesh, tmp_path, rows):
    run = tmp_path / "run"
    convert(ExportArgs(model=str(hf_dir), output_dir=str(run), to_mcore=True), mesh)
    for model, name in ((run, "of-run"), (hf_dir, "of-model")):
        convert(options(model, tmp_path / name, val_dataset=[str(rows)]), mesh)
        (file,) = (tmp_path / name).iterdir()
        assert file.name == f"{name}-bf16.gguf"
        assert examine(file).problems == []
        back = load_file(gguf_model(file) / "model.safetensors")
        before = load_file(hf_dir / "model.safetensors")
        assert back.keys() == before.keys()
        assert all(torch.equal(back[key], before[key]) for key in before)
    assert sorted(path.name for path in tmp_path.iterdir() if "writing" in path.name) == []


@needs_llamacpp
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_drafter_is_in_a_file_of_its_own(family, tmp_path, mesh, rows):
    """llama.cpp loads both files. That of the trunk is read back as the trunk."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    source = make_tiny_hf(tmp_path / "hf", family, dtype=torch.bfloat16, with_tokenizer=True, **sizes)
    trunk = load_file(source / "model.safetensors")
    add_drafter(source, [1, 2], 2)
    convert(options(source, tmp_path / "out", val_dataset=[str(rows)]), mesh)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["out-bf16-draft.gguf", "out-bf16.gguf"]
    back = gguf_model(tmp_path / "out" / "out-bf16.gguf")
    assert "drafter" not in json.loads((back / "config.json").read_text())
    found = load_file(back / "model.safetensors")
    assert found.keys() == trunk.keys()
    assert all(torch.equal(found[key], trunk[key]) for key in trunk)


@needs_llamacpp
def test_an_export_below_the_limit_is_not_written(hf_dir, mesh, tmp_path, rows):
    """Random heads are never right."""
    out = tmp_path / "out"
    limit = {"val_dataset": [str(rows)], "min_acceptance": 0.9, "gguf_type": "q8_0"}
    with pytest.raises(UserError, match=naming("--min_acceptance 0.9")):
        convert(options(hf_dir, out, **limit), mesh)
    assert not out.exists()
    convert(options(hf_dir, out, **limit, force=True), mesh)
    assert [path.name for path in out.iterdir()] == ["out-q8_0.gguf"]


@needs_llamacpp
def test_another_tokenizer_in_llamacpp_is_named(hf_dir, mesh, tmp_path, monkeypatch):
    """Without most of its merges, the tokenizer gives other tokens."""
    from swiftlite.gguf import write

    original = write.tokenizer_metadata

    def changed(directory, vocab_size):
        metadata = original(directory, vocab_size)
        del metadata["tokenizer.ggml.merges"][1:]
        return metadata

    monkeypatch.setattr(write, "tokenizer_metadata", changed)
    with pytest.raises(UserError, match=naming("llama.cpp out-bf16.gguf")):
        convert(options(hf_dir, tmp_path / "out"), mesh)
    assert not (tmp_path / "out").exists()


def test_texts_with_other_tokens_in_llamacpp_are_named(hf_dir, tmp_path, caplog):
    file = hf_dir / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "NFC"}}))
    (tmp_path / "out").mkdir()
    with caplog.at_level("WARNING", "swiftlite"):
        gguf.export_gguf(options(hf_dir, tmp_path / "out"), resolve(hf_dir), tmp_path / "out")
    assert any(mentions(record.getMessage(), "llama.cpp NFC") for record in caplog.records)


@pytest.mark.parametrize("place", [-100, 0.5])
def test_a_changed_number_is_named(hf_dir, mesh, tmp_path, monkeypatch, place):
    """In an expert of zeros, which is the last tensor, or in a matrix of the model."""

    def write(model, file, gguf_type):
        write_gguf(model, file, gguf_type)
        content = bytearray(file.read_bytes())
        content[place if place < 0 else int(place * len(content))] ^= 1
        file.write_bytes(content)

    from swiftlite.gguf.write import write_gguf

    monkeypatch.setattr(gguf, "write_gguf", write)
    with pytest.raises(UserError, match=naming("out-bf16.gguf")):
        convert(options(hf_dir, tmp_path / "out"), mesh)
    assert not (tmp_path / "out").exists()


def test_k_quants_are_left_to_llama_quantize(hf_dir, tmp_path, monkeypatch):
    """The decoder layer of the head keeps q8_0."""
    program = tmp_path / "quantize"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$(dirname "$0")/words"\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setenv("LLAMA_QUANTIZE", str(program))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(UserError, match=naming("llama-quantize")):
        gguf.export_gguf(options(hf_dir, out, gguf_type="q4_k_m"), resolve(hf_dir), out)
    words = (tmp_path / "words").read_text().split()
    assert words[:2] == ["--tensor-type", "blk\\.2\\.=q8_0"]
    assert words[-1] == "q4_k_m"
    assert list(out.iterdir()) == []


@pytest.mark.skipif(quantizer() is None, reason="llama-quantize is not installed")
def test_llama_quantize_writes_the_trunk(tmp_path):
    model = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, with_tokenizer=True, hidden_size=256)
    out = tmp_path / "out"
    out.mkdir()
    file = gguf.export_gguf(options(model, out, gguf_type="q4_k_m"), resolve(model), out)
    found = examine(file)
    assert found.problems == []
    assert found.types["trunk"]["Q4_K"] > 0
    assert set(found.types["heads"]) == {"F32", "Q8_0"}
    assert gguf_model(file).is_dir()  # llama-quantize drops dimensions of 1, such as the idle expert's


def test_a_program_that_cannot_be_run_is_named(hf_dir, tmp_path, monkeypatch):
    program = tmp_path / "quantize"
    program.write_bytes(b"\x7fELF no program")
    program.chmod(0o755)
    monkeypatch.setenv("LLAMA_QUANTIZE", str(program))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(UserError, match=naming(f"{program} LLAMA_QUANTIZE")):
        gguf.export_gguf(options(hf_dir, out, gguf_type="q4_k_m"), resolve(hf_dir), out)
    assert list(out.iterdir()) == []
