"""Test that a GGUF file has the special tokens that llama.cpp's converter (`gguf.SpecialVocab`) finds, and all that end
an answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import SpecialVocab

from swiftlite.base.errors import UserError
from swiftlite.data.template import ChatTemplate, load_tokenizer
from swiftlite.engines.llamacpp import check
from swiftlite.engines.llamacpp.program import program
from swiftlite.engines.llamacpp.request import post
from swiftlite.families.resolved import resolve
from swiftlite.gguf.read import GgufFile
from swiftlite.gguf.tokenizer import tokenizer_metadata
from swiftlite.gguf.write import write_gguf
from tests.gguf.rewritten import rewrite
from tests.llamacpp_here import needs_llamacpp
from tests.messages import mentions, naming
from tests.tiny import make_tiny_hf

VOCABULARY = ["a", "b", "ab", "<bos>", "<eos>", "<pad>", "<user>", "<tool>", "<end>"]
OFFICIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
ALL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


def template(*parts: str) -> dict[str, Any]:
    """Return the post-processor that puts special tokens around a text, "A"."""
    single = [{"Sequence": {"id": "A"}} if part == "A" else {"SpecialToken": {"id": part}} for part in parts]
    return {"type": "TemplateProcessing", "single": single, "pair": []}


def write(directory: Path, post_processor: Any = None, **files: Any) -> Path:
    """Write tokenizer.json, and JSON files by their names without a suffix."""
    vocab = {text: number for number, text in enumerate(VOCABULARY)}
    added = [{"id": number, "content": text, "special": True} for text, number in vocab.items() if text[0] == "<"]
    content = {
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "post_processor": post_processor,
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
    }
    for name, value in {"tokenizer": content, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def found_in(directory: Path) -> dict[str, Any]:
    prefix = "tokenizer.ggml."
    metadata = tokenizer_metadata(directory, len(VOCABULARY))
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.endswith(("_id", "bos_token"))}


def official(directory: Path) -> dict[str, Any]:
    vocab = SpecialVocab(directory, n_vocab=len(VOCABULARY))
    ids = {f"{OFFICIAL[name]}_token_id": number for name, number in vocab.special_token_ids.items()}
    return ids | {"add_bos_token": vocab.add_special_token.get("bos", False)}


@pytest.mark.parametrize(
    ("post_processor", "files"),
    [
        (None, {"tokenizer_config": ALL}),
        (None, {"tokenizer_config": {"bos_token": "<bos>"}, "config": {"eos_token_id": 4, "pad_token_id": 5}}),
        (None, {"tokenizer_config": {"eos_token": {"content": "<eos>"}}, "config": {"eos_token_id": 8}}),
        (None, {"tokenizer_config": {}, "config": {"text_config": {"eos_token_id": 4, "bos_token_id": 3}}}),
        (None, {"tokenizer_config": {"eos_token": "<absent>"}, "config": {"eos_token_id": 4, "bos_token_id": 99}}),
        (template("<bos>", "A"), {"tokenizer_config": ALL}),
        (
            {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template("<bos>", "A")]},
            {"tokenizer_config": ALL},
        ),
        (template("<bos>", "A"), {"tokenizer_config": ALL | {"add_bos_token": False}}),
        (template("A"), {"tokenizer_config": ALL | {"add_bos_token": True}}),
        (template("<user>", "<bos>", "A"), {"tokenizer_config": ALL}),
    ],
)
def test_tokens_equal_those_of_the_converter(tmp_path, post_processor, files):
    directory = write(tmp_path, post_processor, **files)
    found = found_in(directory)
    found.pop("eot_token_id", None)
    assert found == official(directory)
    assert found["eos_token_id"] == 4


@pytest.mark.parametrize(
    "files",
    [
        {"special_tokens_map": {"eos_token": "<eos>"}},
        {"special_tokens_map": {"eos_token": {"content": "<eos>"}}, "tokenizer_config": {}},
        {"generation_config": {"eos_token_id": 4}, "tokenizer_config": {"eos_token": None}},
        {"config": {"eos_token_id": [4]}, "tokenizer_config": {}},
    ],
)
def test_the_token_that_ends_a_text_is_found_where_the_converter_does_not_look(tmp_path, files):
    directory = write(tmp_path, **files)
    assert "eos_token_id" not in official(directory)
    assert found_in(directory)["eos_token_id"] == 4


def test_the_first_token_of_prompts_is_found_where_the_converter_does_not_look(tmp_path):
    directory = write(tmp_path, template("<bos>", "A"), tokenizer_config={}, special_tokens_map=ALL)
    assert (found_in(directory)["bos_token_id"], found_in(directory)["add_bos_token"]) == (3, True)


def test_all_tokens_that_end_an_answer_are_written(tmp_path, caplog):
    directory = write(tmp_path, tokenizer_config=ALL, generation_config={"eos_token_id": [4, 6, 7]})
    ends = {"eos_token_id": 4, "eot_token_id": 6, "eom_token_id": 7}
    assert found_in(directory).items() >= ends.items()
    assert caplog.messages == []
    write(directory, config={"eos_token_id": [6, 8]}, generation_config={"eos_token_id": [4, 6, 7]})
    assert found_in(directory).items() >= ends.items()
    assert mentions(caplog.messages[-1], "<end>")


def test_a_text_without_an_end_is_refused(tmp_path):
    with pytest.raises(UserError, match=naming("eos_token tokenizer_config.json")):
        found_in(write(tmp_path, tokenizer_config={"bos_token": "<bos>"}))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model whose end of text is only in config.json, and whose prompts start with a token."""
    directory = tmp_path_factory.mktemp("special") / "model"
    make_tiny_hf(directory, "qwen3", depth=1, with_tokenizer=True, bos_token_id=1)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": None}))
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>"}))
    content = json.loads((directory / "tokenizer.json").read_text())
    starts = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    content["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}})
    content["post_processor"]["special_tokens"] = starts
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


@needs_llamacpp
def test_llama_cpp_ends_answers_at_these_tokens_alone(model, tmp_path):
    """Without a token that ends a text, llama.cpp would take token 11."""
    file = tmp_path / "model.gguf"
    write_gguf(resolve(model), file, "f32")
    words = program()
    assert words is not None
    with check._serve(words, file) as url:
        request = {"prompt": [3, 4, 5], "n_predict": 4, "temperature": 0, "return_tokens": True}
        answers = [json.loads(post(url, "/completion", request | {"logit_bias": [[n, 100]]})) for n in (11, 2)]
    assert [answer["stop_type"] for answer in answers] == ["limit", "eos"]
    assert answers[0]["tokens"] == [11] * 4


@needs_llamacpp
def test_a_missing_first_token_is_named(model, tmp_path):
    file, changed = tmp_path / "model.gguf", tmp_path / "changed.gguf"
    write_gguf(resolve(model), file, "f32")
    rewrite(file, changed, {"tokenizer.ggml.add_bos_token": False})
    chat, words = ChatTemplate(load_tokenizer(model)), program()
    assert words is not None
    assert check.check_file(words, file, chat, []).problems == []
    assert len(check.check_file(words, changed, chat, []).problems) == len(check.TEXTS)


def test_the_files_come_back(model, tmp_path):
    file, directory = tmp_path / "model.gguf", tmp_path / "back"
    write_gguf(resolve(model), file, "f32")
    directory.mkdir()
    GgufFile(file).write_small_files(directory)
    name = "special_tokens_map.json"
    assert (directory / name).read_text() == (model / name).read_text()
