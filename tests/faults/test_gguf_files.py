"""Test GGUF files with any content: they are read, or rejected with an error that names the file."""

import shutil
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from swiftlite.families.resolved import resolve
from swiftlite.gguf.examine import examine
from swiftlite.gguf.read import GgufFile
from swiftlite.gguf.write import write_gguf
from tests.faults.fuzzing import answer, damaged, fuzz, texts
from tests.gguf.rewritten import rewrite
from tests.tiny import make_tiny_hf

KEYS = (
    "swiftlite.config",
    "swiftlite.dtypes",
    "swiftlite.copies",
    "general.architecture",
    "glm4moe.block_count",
    "glm4moe.nextn_predict_layers",
    "glm4moe.embedding_length",
    "glm4moe.attention.head_count",
    "glm4moe.rope.freq_base",
    "glm4moe.leading_dense_block_count",
    "qwen35.ssm.time_step_rank",
    "qwen35.ssm.inner_size",
    "qwen35.ssm.state_size",
    "qwen35.nextn_predict_layers",
    "split.count",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.huggingface.json",
)
printable = texts.filter(lambda text: text.isprintable())
values = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32),
    printable,
    st.lists(st.integers(0, 100), min_size=1, max_size=3),
    st.lists(printable, min_size=1, max_size=3),
    st.sampled_from(["{}", "[]", '{"default": "load"}', '{"default": 3}', '{"a": "b"}', '{"model_type": 1}']),
)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_text"])
def whole(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    source = make_tiny_hf(folder / "model", request.param, depth=1, with_tokenizer=True)
    write_gguf(resolve(source), folder / "whole.gguf", "bf16")
    return folder / "whole.gguf"


def read(file: Path) -> None:
    """Do what `doctor` and the conversion to a Hugging Face directory do with a file."""
    answer(examine, file, names=file.name)
    content = answer(GgufFile, file, names=file.name)
    if content is not None:
        directory = file.with_suffix("")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        content.write_small_files(directory)
        answer(content.write_weights, directory, names=file.name)


@fuzz
@given(data=st.data())
def test_any_bytes(tmp_path, whole, data):
    content = whole.read_bytes()
    header = 40_000  # metadata and most names of tensors
    file = tmp_path / "any.gguf"
    file.write_bytes(data.draw(damaged(content[:header])) + content[header:])
    read(file)


@fuzz
@given(changes=st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=2), is_foreign=st.booleans())
def test_any_metadata(tmp_path, whole, changes, is_foreign):
    file = tmp_path / "any.gguf"
    rewrite(whole, file, changes, keeps_own=not is_foreign)
    read(file)
