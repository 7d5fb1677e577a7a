"""Test which tokenizers can be converted for llama.cpp, and what is said about them."""

import json

import pytest

from swiftlite.base.errors import UserError
from swiftlite.gguf.tokenizer import PRE_TOKENIZERS, other_tokens, tokenizer_metadata
from tests.messages import naming

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False}
TEKKEN = next(expressions for expressions, name in PRE_TOKENIZERS.items() if name == "tekken")


def write(directory, pre_tokenizer=LEVEL, normalizer=None):
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    content = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b"}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre_tokenizer": SPLIT}, "tokenizer.json ['x']"),
        ({"pre_tokenizer": LEVEL | {"add_prefix_space": True}}, "tokenizer.json <ByteLevel>"),
        ({"pre_tokenizer": SPLIT | {"behavior": "MergedWithNext"}}, "tokenizer.json <Split>"),
        ({"pre_tokenizer": {"type": "Digits", "individual_digits": False}}, "tokenizer.json <Digits>"),
        ({"normalizer": {"type": "Lowercase"}}, "tokenizer.json Lowercase"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}}, "Strip"),
    ],
)
def test_what_llama_cpp_does_not_have_is_refused(tmp_path, changes, named):
    write(tmp_path, **changes)
    with pytest.raises(UserError, match=naming(named)):
        tokenizer_metadata(tmp_path, 3)


def test_other_tokens_are_named(tmp_path):
    write(tmp_path, normalizer={"type": "Sequence", "normalizers": []})
    assert other_tokens(tmp_path) == []
    write(tmp_path, SPLIT | {"pattern": {"Regex": TEKKEN[0]}}, {"type": "NFC"})
    assert tokenizer_metadata(tmp_path, 3)["tokenizer.ggml.pre"] == "tekken"
    form, pieces = other_tokens(tmp_path)
    assert "NFC" in form
    assert "ASCII" in pieces


BY_CHARACTERS = {
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    "pre_tokenizer": None,
    "model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0, "\n": 1, "b": 2}, "merges": []},
}


@pytest.mark.parametrize(("merges", "named"), [([["a", "\n"]], "tokenizer.json merge"), ([], "add_bos_token")])
def test_a_tokenizer_like_that_of_gemma_4_that_llama_cpp_would_change_is_refused(tmp_path, merges, named):
    content = {**BY_CHARACTERS, "model": {**BY_CHARACTERS["model"], "merges": merges}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b"}))
    with pytest.raises(UserError, match=naming(named)):
        tokenizer_metadata(tmp_path, 3)
