"""Fixtures with tokenizers and data files for the tests of `swiftlite/data`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.data.templates import train_bytes, train_metaspace


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    trained = {
        "bytes": train_bytes(),
        "trimmed": train_bytes(trim_offsets=True),
        "metaspace": train_metaspace(),
    }

    def make(
        chat_template: str | None, kind: str = "bytes", eos_token: str = "<|endoftext|>"
    ) -> PreTrainedTokenizerFast:
        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(trained[kind].to_str()),
            eos_token=eos_token,
            pad_token="<|endoftext|>",
            chat_template=chat_template,
        )

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Write rows (or raw lines) to a file in the test's directory, and return its name."""

    def write(rows: list[dict | str], name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write
