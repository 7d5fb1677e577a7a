"""Test the keys with which GGUF files describe themselves, against llama.cpp's converter (`gguf.Metadata`)."""

import json
import re

import pytest
from gguf import GGUFReader, GGUFWriter, Metadata
from safetensors.torch import load_file

from swiftlite.base.errors import UserError
from swiftlite.families.resolved import resolve
from swiftlite.gguf.write import write_gguf
from tests.messages import naming
from tests.tiny import make_tiny_hf

CARD = """---
license: other
license_name: tiny-license
license_link: https://example.com/LICENSE
tags: [math, tiny]
pipeline_tag: text-generation
language: [en, zh]
---
# Tiny
"""
SAMPLING = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": None, "xtc_threshold": "high"}


def general(file):
    fields = GGUFReader(file).fields
    return {key: (field.types, field.contents()) for key, field in fields.items() if key.startswith("general.")}


@pytest.fixture
def model(tmp_path):
    directory = make_tiny_hf(tmp_path / "tiny", "qwen3", depth=1, with_tokenizer=True)
    (directory / "README.md").write_text(CARD)
    (directory / "generation_config.json").write_text(json.dumps(SAMPLING))
    return directory


GUESSED = {"general.basename", "general.finetune", "general.version", "general.organization"}
"""What the converter guesses from the name of the directory."""


def test_descriptions_equal_those_of_the_converter(model, tmp_path):
    """Values whose type is not that of the field are left out."""
    write_gguf(resolve(model), tmp_path / "model.gguf", "bf16")
    found = general(tmp_path / "model.gguf")
    expected = Metadata.load(None, model, "tiny")
    expected.sampling_xtc_threshold = None
    writer = GGUFWriter(tmp_path / "official.gguf", "glm4moe")
    writer.add_type("model")
    expected.set_gguf_meta_model(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    official = general(tmp_path / "official.gguf")
    for key in GUESSED & official.keys():
        del official[key]
    assert {"general.license", "general.tags", "general.sampling.top_k", "general.sampling.temp"} < official.keys()
    assert found.items() >= official.items()
    of_file = {"general.file_type", "general.quantization_version", "general.size_label"}
    assert found.keys() - official.keys() == of_file


@pytest.mark.parametrize(
    ("family", "gguf_type", "file_type", "label"),
    [("qwen3", "f16", 1, r"\d+K"), ("qwen3_moe", "q8_0", 7, r"4x[\d.]+K")],
)
def test_type_and_size(tmp_path, family, gguf_type, file_type, label):
    model = make_tiny_hf(tmp_path / "tiny", family, depth=1, with_tokenizer=True)
    write_gguf(resolve(model), tmp_path / "model.gguf", gguf_type)
    found = {key: value for key, (_, value) in general(tmp_path / "model.gguf").items()}
    assert (found["general.type"], found["general.file_type"]) == ("model", file_type)
    assert found["general.quantization_version"] == 2
    assert re.fullmatch(label, found["general.size_label"])
    if family == "qwen3":  # with zeros for the mixture of one expert that the architecture requires
        size = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
        assert int(found["general.size_label"][:-1]) == pytest.approx(size / 1000, rel=0.1)


def test_a_card_that_is_no_yaml_is_named(model, tmp_path):
    (model / "README.md").write_text("---\nlicense: [\n---\n")
    with pytest.raises(UserError, match=naming("README.md")):
        write_gguf(resolve(model), tmp_path / "model.gguf", "bf16")
