"""Rows packed from files that are read as they are needed, and continued where another stream stopped."""

import itertools
import json

import pyarrow
import pyarrow.parquet
import pytest

from swiftlite.args.fields import TruncationStrategy
from swiftlite.data.dataset import Encoder, load_train_val
from swiftlite.data.sample import digest
from swiftlite.data.stream import Stream
from swiftlite.data.template import ChatTemplate
from swiftlite.errors import UserError
from tests.data.templates import CHATML

BAD = {"query": "q", "response": ""}


def row(i: int, words: int = 1) -> dict:
    return {"query": f"What is {i}?", "response": " ".join([f"It is {i}."] * words)}


@pytest.fixture
def make_stream(make_tokenizer):
    template = ChatTemplate(make_tokenizer(CHATML))

    def make(
        files, max_length=120, truncation_strategy: TruncationStrategy = "delete", buffer_size=8, **options
    ) -> Stream:
        encoder = Encoder(template, max_length, truncation_strategy)
        return Stream(files, encoder, 120, buffer_size=buffer_size, **options)

    return make


def take(stream: Stream, number: int) -> list:
    return list(itertools.islice(stream, number))


def held(stream: Stream) -> list:
    """Samples that were read and not given."""
    rows = stream._rows
    return [sample for _, sample in itertools.chain(rows.waiting, *rows.ready)]


def sources(rows) -> list[list[str]]:
    return [[sample.source for sample in row] for row in rows]


def test_an_epoch_is_what_loading_all_gives(make_stream, make_tokenizer, write_jsonl, tmp_path):
    first = write_jsonl([row(i, i % 7 + 1) for i in range(40)])
    second = str(tmp_path / "more.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(i) for i in range(9)]), second)
    loaded = load_train_val(Encoder(ChatTemplate(make_tokenizer(CHATML)), 120, "delete"), [first, second])
    stream = make_stream([first, second], buffer_size=49)
    seen = {sample.source: sample for sample in [*next(stream), *held(stream)]}
    assert len(seen) == 49
    assert digest(seen[sample.source] for sample in loaded.train) == loaded.digest


def test_every_epoch_brings_every_row(make_stream, write_jsonl):
    path = write_jsonl([row(i, i % 5 + 1) for i in range(23)])
    stream = make_stream([path])
    given = [source for row in sources(take(stream, 60)) for source in row]
    given += [sample.source for sample in held(stream)]
    counts = [given.count(f"{path}:{line}") for line in range(1, 24)]
    assert sum(counts) == stream.num_read
    assert max(counts) - min(counts) <= 1
    assert stream.rows_per_epoch == 23
    assert stream.num_read > 3 * 23
    assert all(sum(map(len, row)) <= 120 for row in take(stream, 20))


@pytest.mark.parametrize("buffer_size", [1, 8, 60])  # the last is more than two epochs
def test_a_stream_goes_on_bit_for_bit(make_stream, write_jsonl, buffer_size):
    rows = [row(i, i % 5 + 1) for i in range(20)]
    path = write_jsonl([*rows[:7], BAD, *rows[7:], row(99, words=60)])
    options = {"buffer_size": buffer_size, "max_bad_rows": 1}
    unbroken = take(make_stream([path], **options), 70)
    for cut in (0, 1, 2, 5, 9, 20, 33, 50):
        stopped = make_stream([path], **options)
        take(stopped, cut)
        state = json.loads(json.dumps(stopped.state()))
        resumed = make_stream([path], **options, state=state)
        assert resumed.state() == state
        rest = take(resumed, 70 - cut)
        assert sources(rest) == sources(unbroken[cut:])
        assert digest(itertools.chain(*rest)) == digest(itertools.chain(*unbroken[cut:]))
    assert [s.source for r in unbroken for s in r].count(f"{path}:8") == 0


def test_only_what_waits_is_tokenized_again(make_stream, write_jsonl, monkeypatch):
    path = write_jsonl([row(i) for i in range(200)])
    stream = make_stream([path])
    take(stream, 25)
    state = stream.state()
    encoded = []
    encode = Encoder.__call__
    monkeypatch.setattr(Encoder, "__call__", lambda self, turns: encoded.append(turns) or encode(self, turns))
    make_stream([path], state=state)
    assert len(encoded) == len(state["waiting"]) + sum(map(len, state["ready"])) < 20 < state["num_read"]


def test_no_more_is_read_than_the_buffer_holds(make_stream, write_jsonl):
    stream = make_stream([write_jsonl([row(i) for i in range(20)] + ["{"])])
    next(stream)
    assert stream.num_read == 8  # the broken line was not reached


def test_bad_rows_count_once_not_in_every_epoch(make_stream, write_jsonl):
    path = write_jsonl([row(1), BAD, row(2), "{"])
    take(make_stream([path], max_bad_rows=2), 30)
    stream = make_stream([path], max_bad_rows=1)
    with pytest.raises(UserError) as caught:
        take(stream, 30)
    assert str(caught.value) == (
        f"{path}:4: column 2: not JSON: Expecting property name enclosed in double quotes; 1 before it were left out\n"
        "    --max_bad_rows 2 leaves it out, but no more after it"
    )


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([row(1), BAD], {}, "FILE:2: response: is empty\n    --max_bad_rows 1 leaves it out, but no more"),
        ([row(1), {"query": "\ud800", "response": "a"}], {}, "FILE:2: messages: half of a surrogate pair"),
        (
            [row(1, 20), row(2, 20)],
            {"max_length": 40},
            "--dataset: of 2 rows none is left to train on\n    those over --max_length 40 are dropped",
        ),
        (
            [row(1), row(2, 20)],
            {"max_length": 40, "truncation_strategy": "error"},
            "FILE:2 has LENGTH tokens, over --max_length 40\n    --max_length LENGTH or more; or --trunc",
        ),
    ],
)
def test_what_a_person_is_told(make_stream, make_tokenizer, write_jsonl, rows, options, message):
    path = write_jsonl(rows)
    with pytest.raises(UserError) as caught:
        take(make_stream([path], **options), 3)
    encoder = Encoder(ChatTemplate(make_tokenizer(CHATML)), 2048, "delete")
    [*_, last] = load_train_val(encoder, [write_jsonl([row(2, 20)], "one.jsonl")]).train
    assert str(caught.value).startswith(message.replace("FILE", path).replace("LENGTH", str(len(last))))


@pytest.mark.parametrize("now", [[row(i) for i in range(4)], [BAD] * 12])
def test_files_that_have_changed(make_stream, write_jsonl, now):
    path = write_jsonl([row(i) for i in range(12)])
    stream = make_stream([path])
    take(stream, 2)
    write_jsonl(now)
    with pytest.raises(UserError, match="is not what this run has read before\n    resume with the same files"):
        make_stream([path], state=stream.state())


def test_the_first_row_with_a_special_token_is_named(make_stream, write_jsonl, caplog):
    said = {"query": "q", "response": "a <|im_end|> b"}
    path = write_jsonl([row(0), said, said])
    stream = make_stream([path], buffer_size=6)
    take(stream, 3)
    (message,) = caplog.messages
    assert message.startswith(f"{path}:2 has <|im_end|>: ")
