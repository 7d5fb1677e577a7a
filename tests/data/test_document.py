"""Test plain text: rows become documents, documents become samples, and splitting a document loses no token."""

import itertools

import numpy as np
import pytest

from swiftlite.args.data_fields import TruncationStrategy
from swiftlite.base.errors import UserError
from swiftlite.data.dataset import load_train_val
from swiftlite.data.encoder import DocumentEncoder, split
from swiftlite.data.rows.conversation import BadRow
from swiftlite.data.rows.document import parse_document
from swiftlite.data.rows.sources import check_row
from swiftlite.data.sample import IGNORED, make_sample
from tests.messages import mentions, naming

TEXT = "Best fit takes the fullest row that still has room. " * 3


@pytest.fixture
def make_encoder(make_tokenizer):
    tokenizer = make_tokenizer(None)

    def make(max_length=2048, truncation_strategy: TruncationStrategy = "split", **options) -> DocumentEncoder:
        return DocumentEncoder(tokenizer, len(tokenizer), max_length, truncation_strategy, **options)

    return make


def encode(encoder, text: str):
    return encoder(parse_document({"text": text}, source="f:1"))


@pytest.mark.parametrize(
    "row",
    [{"text": TEXT, "url": "x"}, {"messages": [{"role": "assistant", "content": TEXT}]}],
    ids=["text", "a turn of the assistant"],
)
def test_formats(row):
    document = parse_document(row | {"channel": "web"}, source="f:1")
    assert document.messages[0]["content"] == TEXT
    assert document.channel == "web"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ([], "row:"),
        ({}, "text:"),
        ({"text": 3}, "text: int"),
        ({"text": " \n"}, "text:"),
        ({"text": "\ud800"}, "text:"),
        ({"text": "a", "channel": 3}, "channel:"),
        ({"text": "a", "images": ["a.png"]}, "images:"),
        ({"text": "a", "videos": ["a.mp4"]}, "videos:"),
        ({"query": "a", "response": "b"}, "row:"),
        ({"messages": [{"role": "user", "content": "a"}]}, "row:"),
    ],
)
def test_bad_rows(row, problem):
    found = check_row(row, "f:1", parse=parse_document)
    assert isinstance(found, BadRow)
    assert mentions(str(found), f"f:1 {problem}")


def test_a_document_is_its_tokens_and_eos(make_encoder):
    encoder = make_encoder()
    tokenizer = encoder.tokenizer
    (sample,) = encode(encoder, TEXT).samples
    assert sample.input_ids.tolist() == [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]
    assert sample.labels.tolist() == [IGNORED, *sample.input_ids[1:].tolist()]
    (without,) = encode(make_encoder(append_eos=False), TEXT).samples
    assert without.input_ids.tolist() == tokenizer(TEXT)["input_ids"]


@pytest.mark.parametrize("max_length", [2, 3, 7, 40, 41, 42])
def test_every_token_but_the_first_is_a_label_once(max_length):
    document = make_sample(np.arange(41), np.ones(41), "f:1", "web")
    pieces = split(document, max_length)
    assert all(2 <= len(piece) <= max_length for piece in pieces)
    labels = np.concatenate([piece.labels[piece.labels != IGNORED] for piece in pieces])
    assert labels.tolist() == list(range(1, 41))
    for before, after in itertools.pairwise(pieces):
        assert before.input_ids[-1] == after.input_ids[0]
    assert {(piece.source, piece.channel) for piece in pieces} == {("f:1", "web")}


@pytest.mark.parametrize(
    ("strategy", "num_samples", "kept"),
    [("split", 5, None), ("left", 1, slice(-20, None)), ("right", 1, slice(20)), ("delete", 0, None)],
)
def test_long_documents(make_encoder, strategy, num_samples, kept):
    whole = encode(make_encoder(), TEXT).samples[0].input_ids
    encoded = encode(make_encoder(20, strategy), TEXT)
    assert encoded.length == len(whole)
    expected = -(-(len(whole) - 1) // 19) if strategy == "split" else num_samples
    assert len(encoded.samples) == expected
    if kept:
        assert encoded.samples[0].input_ids.tolist() == whole[kept].tolist()


def test_pieces_of_one_document_are_held_out_together(make_encoder, write_jsonl, tmp_path):
    path = write_jsonl([{"text": f"{i}. {TEXT}"} for i in range(20)])
    book = tmp_path / "book.txt"
    book.write_text(TEXT)
    data = load_train_val(make_encoder(30), [path, str(book)], split_dataset_ratio=0.2)
    trained = {sample.source for sample in data.train}
    held_out = {sample.source for sample in data.val}
    assert not trained & held_out
    assert len(trained | held_out) == 21
    assert len(data.val_conversations) == len(held_out) == 4
    counts = data.report.total
    assert counts.kept == counts.rows == 21
    assert counts.truncated == 0
    assert counts.tokens == sum(map(len, [*data.train, *data.val]))


def test_what_cannot_be_learned(make_encoder, make_tokenizer):
    encoded = encode(make_encoder(append_eos=False), "a")
    assert mentions(str(encoded.bad), "f:1 text:")
    small = DocumentEncoder(make_tokenizer(None), 50, 2048)
    assert mentions(str(encode(small, TEXT).bad), "vocab_size 50 config.json")
    with pytest.raises(UserError, match=naming("--append_eos false")):
        DocumentEncoder(make_tokenizer(None, eos_token=None), 500, 2048)
