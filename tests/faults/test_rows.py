"""Test data files with any content: every row is a sample or a bad row with its line, or the file is rejected."""

import json
from functools import partial
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given

from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.images import read_image
from swiftlite.data.rows.conversation import FIELDS, ORDER, SHAREGPT_ROLES, parse_row
from swiftlite.data.rows.image_parts import IMAGE_TYPES, RowImage
from swiftlite.data.rows.sources import FileRows, find_rows, read_rows
from swiftlite.data.template import ChatTemplate
from tests.data.images import VISION, encoded, make_image_encoder, noise, with_vision, writer
from tests.data.templates import CHATML, QWEN3, train_bytes
from tests.faults.fuzzing import answer, damaged, fuzz, junk, texts

ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
CALL = {"function": {"name": "get", "arguments": {"a": 1}}}

IMAGE_NAMES = ("image", "image_url", "url", "path")
images = st.one_of(
    junk, st.sampled_from(["a.png", "gone.png", "../a.png", {"url": "a.png"}, "data:image/png;base64,x"])
)
contents = st.one_of(
    texts,
    junk,
    st.lists(st.fixed_dictionaries({"type": st.one_of(st.just("text"), junk), "text": junk}), max_size=2),
    st.sampled_from(["<image>", "See <image> and <image>.", "<|image_pad|>"]),
    st.lists(
        st.fixed_dictionaries({"type": st.sampled_from(IMAGE_TYPES)}, optional=dict.fromkeys(IMAGE_NAMES, images))
    ),
)
turns = st.fixed_dictionaries(
    {},
    optional={
        "role": st.one_of(st.sampled_from([*ORDER]), junk),
        "from": st.one_of(st.sampled_from([*SHAREGPT_ROLES]), junk),
        "content": contents,
        "value": contents,
        "loss": junk,
        "loss_scale": junk,
        "tool_calls": st.one_of(junk, st.just([CALL]), st.lists(st.fixed_dictionaries({"function": junk}), max_size=2)),
        "reasoning_content": junk,
        "name": junk,
    },
)
histories = st.one_of(junk, st.lists(st.lists(contents, min_size=2, max_size=2), max_size=2))
values = st.one_of(
    junk, texts, st.lists(images, max_size=3), st.lists(turns, max_size=4), histories, junk.map(json.dumps)
)
good = st.one_of(contents, st.just("text")).map(
    lambda content: {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]}
)
rows = st.one_of(st.dictionaries(st.one_of(st.sampled_from(sorted(FIELDS)), texts), values, max_size=4), good, junk)


@pytest.fixture(scope="module", params=[CHATML, QWEN3, VISION], ids=["chatml", "qwen3", "images"])
def encoder(request, tmp_path_factory) -> ConversationEncoder:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_bytes(), eos_token="<|endoftext|>", chat_template=request.param
    )
    if request.param != VISION:
        return ConversationEncoder(ChatTemplate(tokenizer, vocab_size=len(tokenizer)), 2048, "delete")
    directory = tmp_path_factory.mktemp("images")
    writer(directory)("a.png")
    reader = make_image_encoder(with_vision(tokenizer), directory, directory)
    template = ChatTemplate(tokenizer, "default", len(tokenizer), reader.sizes)
    return ConversationEncoder(template, 2048, "delete", partial(parse_row, no_images=None), reader)


def check(path: Path, encoder: ConversationEncoder) -> None:
    """Check that every row of a file is accounted for, and that the samples can be trained."""
    read = answer(read_rows, find_rows(str(path)), names=str(path), parse=encoder.parse)
    if read is None:
        return
    assert isinstance(read, FileRows)
    assert read.num_rows == len(read.conversations) + len(read.bad_rows)
    for bad in read.bad_rows:
        assert bad.source.startswith(f"{path}:")
        assert str(bad).encode()
    for conversation in read.conversations:
        encoded = encoder(conversation)
        if encoded.bad:
            assert encoded.bad.source.startswith(f"{path}:")
        elif encoded.samples:
            assert encoded.samples[0].num_trained_tokens
            assert np.isfinite(encoded.samples[0].loss_scale).all()
            assert bool(encoded.samples[0].extras) == bool(conversation.images)


def row_with(**turn: object) -> dict:
    return {"messages": [ROW["messages"][0], {"role": "assistant", "content": "a"} | turn]}


@fuzz
@given(row=rows)
@example(row=row_with(loss_scale=10**400))
@example(row=row_with(loss_scale=1e39))
@example(row=row_with(reasoning_content=[1]))
@example(row=row_with(content=[{"type": "text", "text": 5}]))
@example(row={"query": "q", "response": "a", "channel": "\ud83d"})
@example(row={"\ud83d": 1})
@example(row={"query": "\ud83d", "response": "a"})
@example(row={"query": "q", "response": "a", "tools": "[" * 5000})
def test_any_row(tmp_path, encoder, row):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(row) + "\n")
    check(path, encoder)


@fuzz
@given(content=st.one_of([damaged(encoded(noise(9, 7), kind)) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]))
def test_any_bytes_of_an_image(tmp_path, content):
    image = answer(read_image, RowImage(content, "images[0]"), tmp_path, names="images[0]")
    if image is not None:
        assert image.load().size == (image.width, image.height)


@fuzz
@given(content=damaged((json.dumps(ROW) + "\n").encode() * 2))
@example(content=b'{"messages":' + b"[" * 10_000)
@example(content=b'{"messages":' + b"[" * 500 + b"]" * 500 + b"}")
@example(content=b'{"loss_scale":' + b"9" * 5000 + b"}")
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_any_bytes_of_json(tmp_path, encoder, content, suffix):
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(content)
    check(path, encoder)


@fuzz
@given(content=damaged(b'query,response,channel\nq,a,c\n"q\nq",a,\n'))
@example(content=b"query,response,query\nq,a,b\n")
def test_any_bytes_of_csv(tmp_path, encoder, content):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    check(path, encoder)


def parquet() -> bytes:
    table = pyarrow.table({"query": ["q1", "q2"] * 20, "response": ["a"] * 40, "day": [None, 1] * 20})
    out = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, out, compression="NONE")
    return out.getvalue().to_pybytes()


@fuzz
@given(content=damaged(parquet()))
@example(content=parquet().replace(b"q1", b"\xff\xfe"))
def test_any_bytes_of_parquet(tmp_path, encoder, content):
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    check(path, encoder)
