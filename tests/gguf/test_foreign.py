"""Test that files of other programs are read with their heads: written again, they give the same file."""

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer

from swiftlite.base.errors import UserError
from swiftlite.bridge.audit import audit_hf
from swiftlite.engines.llamacpp.check import TEXTS
from swiftlite.families.resolved import resolve
from swiftlite.families.serving.llamacpp import ARCHITECTURES
from swiftlite.gguf.foreign import Metadata, tokenizer_files
from swiftlite.gguf.read import GgufFile
from swiftlite.gguf.tokenizer import PRE_TOKENIZERS, expressions_of
from swiftlite.gguf.write import write_gguf
from swiftlite.hub.gguf import gguf_model
from tests.gguf.rewritten import OF_SWIFTLITE, rewrite
from tests.messages import naming
from tests.tiers import some_of
from tests.tiny import ALIKE, make_tiny_hf

NOT_READ = ("nemotron_h",)
"""Families whose files of other programs are refused."""
READ = [family for family in ARCHITECTURES if family not in NOT_READ]
FAMILIES = some_of(READ, *(family for family in READ if family not in ALIKE))
READ_AS = {
    "kimi_k2": "deepseek_v3",
    "mistral": "llama",
    "seed_oss": "qwen2",
    "mimo": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Families with the same computation as another one, as which they are read."""


def contents(file: Path) -> dict:
    """Return the metadata of a file, without those that only swiftlite writes and without its name."""
    fields = GGUFReader(file).fields
    left_out = ("GGUF.", "general.name", *OF_SWIFTLITE)
    return {key: field.contents() for key, field in fields.items() if not key.startswith(left_out)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_another_program_is_read_with_its_heads(tmp_path, monkeypatch, family):
    source = make_tiny_hf(tmp_path / "source", family, depth=1, dtype=torch.bfloat16, with_tokenizer=True)
    first, foreign, again = (tmp_path / f"{name}.gguf" for name in ("first", "foreign", "again"))
    write_gguf(resolve(source), first, "bf16")
    rewrite(first, foreign)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    directory = gguf_model(foreign)
    model = resolve(directory)
    assert model.family.name == READ_AS.get(family, family)
    assert model.heads.layers == 1
    assert audit_hf(directory, model.family) == []
    write_gguf(model, again, "bf16")
    assert contents(again) == contents(first)
    before = {tensor.name: tensor for tensor in GGUFReader(first).tensors}
    after = {tensor.name: tensor for tensor in GGUFReader(again).tensors}
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor.tensor_type == before[name].tensor_type, name
        assert (tensor.data == before[name].data).all(), name
    mine = Tokenizer.from_file(str(directory / "tokenizer.json"))
    its = Tokenizer.from_file(str(source / "tokenizer.json"))
    for text in (*TEXTS, "<|im_start|>user"):
        assert mine.encode(text, add_special_tokens=False).ids == its.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("expressions", PRE_TOKENIZERS, ids=PRE_TOKENIZERS.get)
def test_every_pre_tokenizer_is_restored(expressions):
    letters = ["a", "b", "1", "2", "Ġ"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE_TOKENIZERS[expressions],
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.merges": [],
    }
    restored = Tokenizer.from_str(tokenizer_files(Metadata(values, set()))["tokenizer.json"])
    assert restored.decode(restored.encode("ab 12", add_special_tokens=False).ids) == "ab 12"
    assert tuple(expressions_of(json.loads(restored.to_str())["pre_tokenizer"])) == expressions


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"general.architecture": "step35"}, "'step35' glm4moe"),
        ({"general.architecture": "dflash"}, "drafter dflash X-draft.gguf"),
        ({"tokenizer.ggml.pre": "whitespace"}, "'whitespace' qwen2"),
        ({"tokenizer.ggml.model": "llama"}, "'llama' gpt2"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, values, named):
    source = make_tiny_hf(tmp_path / "source", "qwen3", depth=1, with_tokenizer=True)
    write_gguf(resolve(source), tmp_path / "first.gguf", "bf16")
    foreign = rewrite(tmp_path / "first.gguf", tmp_path / "foreign.gguf", values)
    with pytest.raises(UserError, match=naming(f"foreign.gguf {named}")):
        GgufFile(foreign)


def test_a_missing_key_is_named(tmp_path):
    source = make_tiny_hf(tmp_path / "source", "qwen3", depth=1, with_tokenizer=True)
    write_gguf(resolve(source), tmp_path / "first.gguf", "bf16")
    foreign = rewrite(tmp_path / "first.gguf", tmp_path / "foreign.gguf", without=("glm4moe.context_length",))
    with pytest.raises(UserError, match=naming("foreign.gguf glm4moe.context_length")):
        GgufFile(foreign)
