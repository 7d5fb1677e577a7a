"""Test rows that are packed from files while they are read, and continuing from the state of another stream."""

import copy
import gzip
import itertools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from swiftlite.args.data_fields import TruncationStrategy
from swiftlite.base.errors import UserError
from swiftlite.data.dataset import load_train_val
from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.packing.packing import RowStream, StreamSample
from swiftlite.data.packing.stream import CHUNK_ROWS, CHUNKS_AHEAD, Readers, Stream
from swiftlite.data.rows.sources import DataFile
from swiftlite.data.sample import Sample, digest
from swiftlite.data.template import ChatTemplate
from tests.data.templates import CHATML
from tests.messages import mention_each, mentions, naming
from tests.tiers import some_of

BAD = {"query": "q", "response": ""}


def row(i: int, words: int = 1) -> dict:
    return {"query": f"What is {i}?", "response": " ".join([f"It is {i}."] * words)}


class Rows:
    """Packed rows of a stream with one reader, as training uses them."""

    def __init__(self, stream: Stream, buffer_size: int, state: dict):
        self.stream = stream
        self.packed = RowStream(
            stream,
            120,
            buffer_size,
            waiting=itertools.starmap(StreamSample, state.get("waiting", ())),
            ready=[list(itertools.starmap(StreamSample, row)) for row in state.get("ready", ())],
        )
        stream.hold(self.waiting)

    @property
    def waiting(self) -> list[StreamSample]:
        """Samples that were read but not returned yet."""
        return [*self.packed.waiting, *itertools.chain(*self.packed.ready)]

    def take(self, number: int) -> list[list[Sample]]:
        return [self.stream.take(row) for row in itertools.islice(self.packed, number)]

    def state(self) -> dict:
        written = self.stream.state() | {"waiting": self.packed.waiting, "ready": list(self.packed.ready)}
        return json.loads(json.dumps(written))


@pytest.fixture
def make_encoder(make_tokenizer):
    template = ChatTemplate(make_tokenizer(CHATML))

    def make(max_length: int = 120, truncation_strategy: TruncationStrategy = "delete") -> ConversationEncoder:
        return ConversationEncoder(template, max_length, truncation_strategy)

    return make


@pytest.fixture
def make_rows(make_encoder):
    def make(files, buffer_size=8, state=None, max_length=120, truncation_strategy="delete", **options) -> Rows:
        stream = Stream(files, make_encoder(max_length, truncation_strategy), state=state, **options)
        return Rows(stream, buffer_size, state or {})

    return make


def sources(rows) -> list[list[str]]:
    return [[sample.source for sample in row] for row in rows]


def test_an_epoch_is_what_loading_all_gives(make_encoder, write_jsonl, tmp_path):
    first = write_jsonl([row(i, i % 7 + 1) for i in range(40)])
    second = str(tmp_path / "more.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(i) for i in range(9)]), second)
    loaded = load_train_val(make_encoder(), [first, second])
    stream = Stream([first, second], make_encoder())
    assert digest(stream.take(itertools.islice(stream, 49))) == loaded.digest


def test_every_epoch_brings_every_row(make_rows, write_jsonl):
    path = write_jsonl([row(i, i % 5 + 1) for i in range(23)])
    rows = make_rows([path])
    given = [source for row in sources(rows.take(60)) for source in row]
    given += [sample.source for sample in rows.stream.take(rows.waiting)]
    counts = [given.count(f"{path}:{line}") for line in range(1, 24)]
    assert sum(counts) == rows.stream.num_read + 1  # the last sample has come, its row is not over
    assert max(counts) - min(counts) <= 1
    assert rows.stream.rows_per_epoch == [23]
    assert sum(counts) > 3 * 23


@pytest.mark.parametrize("buffer_size", some_of([1, 8, 60], 1, 60))  # the last is more than two epochs
def test_a_stream_goes_on_bit_for_bit(make_rows, write_jsonl, buffer_size):
    rows = [row(i, i % 5 + 1) for i in range(20)]
    path = write_jsonl([*rows[:7], BAD, *rows[7:], row(99, words=60)])
    options = {"buffer_size": buffer_size, "max_bad_rows": 1}
    unbroken = make_rows([path], **options).take(70)
    for cut in (0, 2, 9, 33):
        stopped = make_rows([path], **options)
        stopped.take(cut)
        state = stopped.state()
        resumed = make_rows([path], **options, state=state)
        assert resumed.state() == state
        rest = resumed.take(70 - cut)
        assert sources(rest) == sources(unbroken[cut:])
        assert digest(itertools.chain(*rest)) == digest(itertools.chain(*unbroken[cut:]))
    assert [s.source for r in unbroken for s in r].count(f"{path}:8") == 0


class Meeting:
    """Readers in threads, which exchange numbers."""

    def __init__(self, size: int):
        self._barrier = threading.Barrier(size, timeout=60)
        self._said: list[list[int]] = [[]] * size

    def reader(self, rank: int) -> Readers:
        def gather(numbers: list[int]) -> list[list[int]]:
            self._said[rank] = numbers
            self._barrier.wait()
            everyone = list(self._said)
            self._barrier.wait()
            return everyone

        return Readers(rank, len(self._said), gather)


def read_together(
    files, make_encoder, size: int, number: int, **options
) -> list[tuple[list[StreamSample], list[Sample]]]:
    """Return, for each of `size` readers, the first entries of the stream and the samples that the reader holds."""
    meeting = Meeting(size)

    def read(rank: int) -> tuple[list[StreamSample], list[Sample]]:
        stream = Stream(files, copy.deepcopy(make_encoder()), readers=meeting.reader(rank), **options)
        entries = list(itertools.islice(stream, number))
        return entries, stream.take(entries)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(read, range(size)))


def test_several_readers_see_the_same_and_share_the_samples(make_encoder, write_jsonl):
    files = [write_jsonl([row(i, i % 5 + 1) for i in range(60)] + [BAD]), write_jsonl([row(7)] * 30, "more.jsonl")]
    options = {"probabilities": [3, 1], "seed": 5, "max_bad_rows": 1}
    ((alone, samples),) = read_together(files, make_encoder, 1, 200, **options)
    for size in (2, 3):
        parts = read_together(files, make_encoder, size, 200, **options)
        assert [entries for entries, _ in parts] == [alone] * size
        by_place = [(entry.row, sample) for entry, sample in zip(alone, samples, strict=True)]
        for rank, (_, own) in enumerate(parts):
            assert digest(own) == digest(sample for number, sample in by_place if number % size == rank)


def test_all_readers_name_the_bad_row_of_one(make_encoder, write_jsonl):
    path = write_jsonl([row(1), row(2), BAD, row(3)])
    meeting = Meeting(2)

    def read(rank: int) -> str:
        with pytest.raises(UserError) as caught:
            list(itertools.islice(Stream([path], copy.deepcopy(make_encoder()), readers=meeting.reader(rank)), 9))
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(read, range(2)))
    assert mention_each(messages, [f"{path}:3 response: --max_bad_rows 1"] * 2)


def test_shares_of_files(make_encoder, write_jsonl):
    files = [write_jsonl([row(i) for i in range(100)], f"{name}.jsonl") for name in "ab"]
    stream = Stream(files, make_encoder(), probabilities=[0.8, 0.2], seed=3)
    samples = stream.take(itertools.islice(stream, 2000))
    of_first = [sample.source for sample in samples if sample.source.startswith(files[0])]
    # 1,600 draws are wanted; the deviation of 2,000 draws is 18.
    assert abs(len(of_first) - 1600) < 4 * 18
    assert of_first[:200] == [f"{files[0]}:{line}" for line in range(1, 101)] * 2  # each file in its order, and again


def test_only_what_waits_is_tokenized_again(make_rows, write_jsonl, monkeypatch):
    path = write_jsonl([row(i) for i in range(200)])
    rows = make_rows([path])
    rows.take(25)
    state = rows.state()
    encoded = []
    encode = ConversationEncoder.__call__

    def count(self, turns):
        if threading.current_thread() is threading.main_thread():  # the first stream may still read ahead
            encoded.append(turns)
        return encode(self, turns)

    monkeypatch.setattr(ConversationEncoder, "__call__", count)
    resumed = make_rows([path], state=state)
    assert len(encoded) == len(resumed.waiting) < 20 < state["num_read"]


@pytest.mark.parametrize("num_read", [750, 1750], ids=["in the first epoch", "in the second"])
def test_rows_that_have_come_are_passed_over_once(make_rows, write_jsonl, monkeypatch, num_read):
    files = [write_jsonl([row(i) for i in range(500)], f"{name}.jsonl") for name in "ab"]
    rows = make_rows(files)
    while rows.stream.num_read < num_read:
        rows.take(1)
    passed = rows.stream.num_read % 1000
    read = []
    unparsed_rows = DataFile.unparsed_rows

    def counted(file: DataFile):
        for row in unparsed_rows(file):
            read.append(row.line)
            yield row

    monkeypatch.setattr(DataFile, "unparsed_rows", counted)
    resumed = make_rows(files, state=rows.state())
    assert resumed.waiting
    resumed.take(10)
    read_ahead = CHUNK_ROWS * (CHUNKS_AHEAD + 2)
    assert passed >= 750
    compared = 0
    if num_read > 1000:  # all rows were read in the first epoch, and none of them may have changed
        compared = 1000
    assert passed < len(read) - compared < passed + 100 + read_ahead < 2 * passed


def test_a_row_is_bad_when_it_is_reached(make_rows, write_jsonl):
    rows = make_rows([write_jsonl([row(i) for i in range(20)] + ["{"])])
    rows.take(1)
    assert rows.stream.num_read == 7  # seven rows, and the sample of the eighth; the broken line was not reached


def test_bad_rows_count_once_not_in_every_epoch(make_rows, write_jsonl):
    path = write_jsonl([row(1), BAD, row(2), "{"])
    make_rows([path], max_bad_rows=2).take(30)
    rows = make_rows([path], max_bad_rows=1)
    with pytest.raises(UserError) as caught:
        rows.take(30)
    assert mentions(str(caught.value), f"{path}:4 2 JSON 1 --max_bad_rows 2")


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([row(1), BAD], {}, "FILE:2 response: --max_bad_rows 1"),
        ([row(1), {"query": "\ud800", "response": "a"}], {}, "FILE:2 messages:"),
        (
            [row(1, 20), row(2, 20)],
            {"max_length": 40},
            "--dataset 2 --max_length 40",
        ),
        (
            [row(1), row(2, 20)],
            {"max_length": 40, "truncation_strategy": "error"},
            "FILE:2 LENGTH --max_length 40 --truncation_strategy",
        ),
    ],
)
def test_what_a_person_is_told(make_rows, make_encoder, write_jsonl, rows, options, message):
    path = write_jsonl(rows)
    with pytest.raises(UserError) as caught:
        make_rows([path], **options).take(3)
    [*_, last] = load_train_val(make_encoder(2048), [write_jsonl([row(2, 20)], "one.jsonl")]).train
    assert mentions(str(caught.value), message.replace("FILE", path).replace("LENGTH", str(len(last))))


def write_rows(path: Path, rows: list) -> str:
    """Write rows to a file of any format that can be streamed."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return str(path)
    content = "\n".join(map(json.dumps, rows)).encode()  # without a last line break
    if path.suffix == ".gz":
        content = gzip.compress(content)
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_rows_that_were_not_read_may_change(make_rows, tmp_path, name):
    rows = [row(i) for i in range(20)]
    path = write_rows(tmp_path / name, rows)
    stopped = make_rows([path])
    stopped.take(3)
    state = stopped.state()
    num_read = state["files"][0][0]
    assert 3 < num_read < 19
    assert state["rows_per_epoch"] == [0]  # although the end of the file was read ahead

    later = [row(i) for i in range(100, 130)]
    changed = rows[:num_read] + later
    moved = write_rows(tmp_path / f"moved-{name}", changed)
    resumed = make_rows([moved], state=state)
    assert resumed.state() == state
    expected = make_rows([moved]).take(20)[3:]
    rest = resumed.take(17)
    assert digest(itertools.chain(*rest)) == digest(itertools.chain(*expected))

    for place in (0, num_read - 1):
        changed = [row(77) if number == place else each for number, each in enumerate(rows)]
        write_rows(tmp_path / name, changed)
        with pytest.raises(UserError, match=naming(f"--dataset {name}")):
            make_rows([path], state=state).take(1)
    write_rows(tmp_path / name, rows[: num_read - 1])
    with pytest.raises(UserError, match=naming(f"--dataset {name}")):
        make_rows([path], state=state).take(1)


@pytest.mark.parametrize("change", ["the last row", "a further row"])
def test_no_row_may_change_in_a_later_epoch(make_rows, write_jsonl, change):
    rows = [row(i) for i in range(20)]
    files = [write_jsonl(rows, "a.jsonl"), write_jsonl(rows[:9], "b.jsonl")]
    stopped = make_rows(files)
    while stopped.stream.num_read < 35:
        stopped.take(1)
    state = stopped.state()
    assert make_rows(files, state=state).state() == state
    write_jsonl([*rows[:8], row(50)] if change == "the last row" else [*rows[:9], row(50)], "b.jsonl")
    with pytest.raises(UserError, match=naming("--dataset b.jsonl")):
        make_rows(files, state=state)


def test_a_file_that_changes_between_two_epochs(make_rows, write_jsonl):
    path = write_jsonl([row(i) for i in range(300)])
    rows = make_rows([path])
    rows.take(1)  # the file is open, and is replaced rather than written to
    Path(path).unlink()
    write_jsonl([row(i) for i in range(299)] + [row(5)])
    with pytest.raises(UserError, match=naming(f"--dataset {path}")):
        rows.take(300)


def test_each_file_of_a_mixture_may_change_behind_its_position(make_rows, write_jsonl):
    files = [write_jsonl([row(i) for i in range(60)], f"{name}.jsonl") for name in "ab"]
    options = {"probabilities": [3, 1], "seed": 5}
    stopped = make_rows(files, **options)
    stopped.take(9)
    state = stopped.state()
    (of_a, _), (of_b, _) = state["files"]
    assert 60 > of_a > of_b > 0
    assert of_a + of_b == state["num_read"] + 1  # the row of the last sample is not over
    write_jsonl([row(i) for i in range(of_b)] + [row(7)] * 60, "b.jsonl")
    resumed = make_rows(files, **options, state=state)
    assert sources(resumed.take(5)) == sources(make_rows(files, **options).take(14)[9:])
    write_jsonl([row(i) for i in range(of_a - 1)] + [row(7)] * 60, "a.jsonl")
    with pytest.raises(UserError, match=naming("--dataset a.jsonl")):
        make_rows(files, **options, state=state).take(1)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_state_without_digests_gains_them(make_rows, write_jsonl, epoch):
    """Earlier releases wrote such states."""
    files = [write_jsonl([row(i) for i in range(20)], "a.jsonl"), write_jsonl([row(i) for i in range(9)], "b.jsonl")]
    stopped = make_rows(files)
    while stopped.stream.num_read < 29 * epoch - 5:
        stopped.take(1)
    state = stopped.state()
    earlier = {name: value for name, value in state.items() if name != "files"}
    assert make_rows(files, state=earlier).state() == state


@pytest.mark.parametrize("size", [1, 2])
def test_the_command_that_a_bad_row_names_continues_the_stream(make_encoder, write_jsonl, size):
    """The state is that of the last checkpoint; the stream then ends as one over the rows without the bad ones."""
    rows = [row(i, i % 5 + 1) for i in range(40)]
    path = write_jsonl([*rows[:20], BAD, *rows[20:30], "{", *rows[30:]])
    meeting = Meeting(size)

    def read(rank: int) -> list[Sample]:
        state, allowed, samples = None, 0, []
        while len(samples) < 40:
            readers, encoder = meeting.reader(rank), copy.deepcopy(make_encoder())
            stream = Stream([path], encoder, readers=readers, max_bad_rows=allowed, state=state)
            stream.hold([])
            try:
                for entry in itertools.islice(stream, 40 - len(samples)):
                    samples += stream.take([entry]) or [None]
                    state = json.loads(json.dumps(stream.state()))
            except UserError as error:
                (number,) = re.findall(r"--resume --max_bad_rows (\d+)", str(error))
                allowed = int(number)
        assert allowed == 2
        return [sample for sample in samples if sample]

    with ThreadPoolExecutor(size) as pool:
        found = [sample for own in pool.map(read, range(size)) for sample in own]
    loaded = load_train_val(make_encoder(), [write_jsonl(rows, "good.jsonl")])
    found.sort(key=lambda sample: int(sample.source.rpartition(":")[2]))
    assert digest(found) == loaded.digest


def test_nodes_with_different_files_are_refused(make_encoder, write_jsonl):
    files = [write_jsonl([row(i) for i in range(40)] + [row(last)], f"{last}.jsonl") for last in range(2)]
    meeting = Meeting(2)

    def read(rank: int) -> None:
        stream = Stream([files[rank]], copy.deepcopy(make_encoder()), readers=meeting.reader(rank))
        with pytest.raises(UserError, match=naming("--dataset")):
            list(itertools.islice(stream, 41))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, range(2)))


@pytest.mark.parametrize(("now", "named"), [([row(i) for i in range(4)], "--dataset"), ([BAD] * 12, "train.jsonl")])
def test_files_that_have_changed(make_rows, write_jsonl, now, named):
    path = write_jsonl([row(i) for i in range(12)])
    rows = make_rows([path])
    rows.take(2)
    write_jsonl(now)
    with pytest.raises(UserError, match=naming(named)) as caught:
        make_rows([path], state=rows.state())
    assert not mentions(str(caught.value), "--max_bad_rows")


def test_a_file_that_ends_before_a_row_that_waits(make_rows, write_jsonl):
    """The file ends before the rows to skip do. Row 0 has the same length as the waiting row."""
    all_rows = [row(i) for i in range(50)]
    path = write_jsonl(all_rows)
    rows = make_rows([path])
    rows.take(1)
    num_read = rows.stream.num_read
    assert max(entry.row for entry in rows.waiting) == num_read < 10
    assert rows.stream.rows_per_epoch == [0]
    write_jsonl(all_rows[:num_read])
    with pytest.raises(UserError, match=naming("--dataset")):
        make_rows([path], state=rows.state())


def test_the_first_row_with_a_special_token_is_named(make_rows, write_jsonl, caplog):
    said = {"query": "q", "response": "a <|im_end|> b"}
    path = write_jsonl([row(0), said, said])
    make_rows([path], buffer_size=6).take(3)
    (message,) = caplog.messages
    assert mentions(message, f"{path}:2 <|im_end|>")
