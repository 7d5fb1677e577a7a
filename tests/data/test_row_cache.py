"""Rows in memory and in `--dataset_cache`: equal to rows that are encoded one by one, and never half of them."""

import errno
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftlite.base.errors import UserError
from swiftlite.base.json_file import parse_json
from swiftlite.data import encoded_rows, row_cache
from swiftlite.data.changed_samples import lengths_of
from swiftlite.data.dataset import load_train_val
from swiftlite.data.encoded_rows import COLUMNS, Samples
from swiftlite.data.encoder import ConversationEncoder, DocumentEncoder, EncoderPool
from swiftlite.data.row_cache import COMPLETE, RowCache
from swiftlite.data.rows.conversation import Conversation, parse_row
from swiftlite.data.rows.pair import parse_pair
from swiftlite.data.rows.rated import parse_rated
from swiftlite.data.rows.sources import find_rows
from swiftlite.data.sample import digest
from swiftlite.data.template import ChatTemplate
from swiftlite.data.template_kwargs import with_kwargs
from tests.data.templates import CHATML
from tests.messages import mentions

STORED = 3  # a part of the tests has this many rows


@dataclass(frozen=True)
class Counting(ConversationEncoder):
    """Counts the rows that it encodes, and calls a function before each."""

    def __call__(self, row):
        self.before(row)
        return super().__call__(row)

    @staticmethod
    def before(row):
        pass


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(encoded_rows, "PART_ROWS", STORED)


@pytest.fixture
def counted(monkeypatch) -> list[str]:
    """The sources of the rows that were encoded."""
    rows: list[str] = []
    monkeypatch.setattr(Counting, "before", staticmethod(lambda row: rows.append(row.source)))
    return rows


@pytest.fixture
def make_encoder(make_tokenizer):
    def make(cls=Counting, chat_template=CHATML, **options):
        options = {"max_length": 60, "truncation_strategy": "right", "parse": parse_row, **options}
        return cls(ChatTemplate(make_tokenizer(chat_template)), **options)

    return make


def row(i: int, words: int = 2) -> dict:
    return {"query": f"What is {i}?", "response": f"It is {i}. " * words, "channel": f"c{i % 2}"}


ROWS = [row(0), row(1, 30), "{", row(2), {"query": "\ud800", "response": "a"}, *map(row, range(3, 12))]


def one_by_one(encoder, path: str) -> list:
    """Return the samples of a file, without `dataset.py`."""
    samples = []
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        try:
            parsed = encoder.parse(parse_json(line), system=None, source=f"{path}:{number}")
        except (ValueError, UserError):
            continue
        samples += encoder(parsed).samples
    return samples


def check_same(samples, expected) -> None:
    samples = list(samples)
    assert digest(samples) == digest(expected)
    for ours, theirs in zip(samples, expected, strict=True):
        for one, other in zip(ours.sequences, theirs.sequences, strict=True):
            assert (one.source, one.channel, one.trains_heads) == (other.source, other.channel, other.trains_heads)
            assert one.extras == other.extras
            for name in ("input_ids", "labels", "loss_scale"):
                assert vars(one)[name].dtype == vars(other)[name].dtype
                assert np.array_equal(vars(one)[name], vars(other)[name])


def kinds(make_encoder, make_tokenizer):
    pairs = [{**row(i), "rejected_response": f"It is not {i}, or is it?"} for i in range(8)]
    texts = [{"text": f"{i} " * (10 * i + 2), "channel": None if i % 3 else "c"} for i in range(8)]
    return {
        "conversations": (ROWS, make_encoder()),
        "pairs": (pairs, make_encoder(parse=parse_pair)),
        "documents": (texts, DocumentEncoder(make_tokenizer(None), 1000, 40)),
        "rated": ([{**row(i), "label": i % 2 == 0} for i in range(8)], make_encoder(parse=parse_rated)),
    }


@pytest.mark.parametrize("kind", ["conversations", "pairs", "documents", "rated"])
def test_samples_equal_those_of_rows_encoded_one_by_one(make_encoder, make_tokenizer, write_jsonl, tmp_path, kind):
    rows, encoder = kinds(make_encoder, make_tokenizer)[kind]
    path = write_jsonl(rows)
    expected = one_by_one(encoder, path)
    cache = RowCache(tmp_path / "cache")
    found = [load_train_val(encoder, [path], max_bad_rows=2, cache=each) for each in (None, cache, cache)]
    for data in found:
        check_same(data.train, expected)
        assert data.digest == digest(expected)
        assert data.report == found[0].report
        check_same(data.train[2:5], expected[2:5])
        check_same([data.train[-1]], expected[-1:])
    lengths, starts = lengths_of(found[0].train)
    for one, other in zip((lengths, starts), lengths_of(expected), strict=True):
        assert np.array_equal(one, other)
    assert list((tmp_path / "cache").rglob("*.safetensors"))


def parse_with_extras(row: object, **options: Any) -> Conversation:
    return replace(parse_row(row, **options), extras={"weight": 1.0})


def test_rows_that_cannot_be_stored_are_recognized_by_the_first_one(make_encoder, write_jsonl, tmp_path, counted):
    """Otherwise all ranks would wait while one of them encodes rows that it discards."""
    path = write_jsonl([row(i) for i in range(8)])
    data = load_train_val(make_encoder(parse=parse_with_extras), [path], cache=RowCache(tmp_path / "cache"))
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []
    assert len(data.train) == 8
    assert len(counted) == 1 + 8


@pytest.mark.parametrize("spec", ["", "#7"])
def test_the_cache_changes_no_result(make_encoder, write_jsonl, tmp_path, counted, spec):
    train, other = write_jsonl(ROWS), write_jsonl([row(i) for i in range(20, 26)], "other.jsonl")
    options = {"split_dataset_ratio": 0.3, "max_bad_rows": 2, "seed": 5, "interleave_prob": [0.6, 0.4]}

    def load(cache=None):
        return load_train_val(make_encoder(), [train + spec, other], **options, cache=cache)

    expected = load()
    assert sum(counts.not_sampled for counts in expected.report.files.values()) > 0
    for _ in range(2):
        data = load(RowCache(tmp_path / "cache"))
        check_same(data.train, expected.train)
        check_same(data.val, expected.val)
        assert (data.report, data.digest) == (expected.report, expected.digest)
        assert list(data.val_conversations) == list(expected.val_conversations)
        assert data.val_conversations[1:3] == expected.val_conversations[1:3]
        assert [one.source for one in data.val_conversations] == [sample.source for sample in data.val]
    assert len(counted) % 2 == 0
    assert len(set(counted)) * 2 == len(counted)  # once in memory, and once for both loads with a cache


def test_memory_of_a_token_and_of_a_row(make_encoder, write_jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(encoded_rows, "PART_ROWS", 1000)
    path = write_jsonl([row(i) for i in range(200)])
    data = load_train_val(make_encoder(), [path], cache=RowCache(tmp_path / "cache"))
    samples = data.train
    assert isinstance(samples, Samples)
    (part,) = samples.rows.parts
    assert isinstance(part.columns["input_ids"].base, np.memmap)
    per_row = [value for name, value in vars(samples.rows).items() if name.endswith(("_R", "_S"))]
    counts = data.report.total
    assert sum(array.nbytes for array in (*per_row, samples.sequences())) <= 75 * counts.rows  # of each rank
    (file,) = (tmp_path / "cache").rglob("*.safetensors")
    assert file.stat().st_size <= 8 * counts.tokens + 50 * counts.rows + 2000


def test_other_rows_or_options_have_other_files(make_encoder, write_jsonl, tmp_path, counted):
    path, copy = write_jsonl(ROWS), write_jsonl(ROWS, "copy.jsonl")
    cache = RowCache(tmp_path / "cache")

    def num_encoded(spec=path, system=None, seed=0, **options) -> int:
        counted.clear()
        with EncoderPool(make_encoder(**options), 1) as pool:
            assert cache.open(find_rows(spec), pool, system=system, seed=seed)
        return len(counted)

    assert num_encoded() == 13
    assert num_encoded(seed=1) == 0  # without a sample, the seed has no effect
    assert num_encoded(max_length=50) == 13
    assert num_encoded(chat_template=CHATML + "{# another #}") == 13
    assert num_encoded(chat_template=with_kwargs(CHATML, {"enable_thinking": False})) == 13
    assert num_encoded(chat_template=with_kwargs(CHATML, {"enable_thinking": True})) == 13
    assert num_encoded(system="s") == 13
    assert num_encoded(parse=partial(parse_row, no_images="why")) == 13
    assert num_encoded(path + "#5") == num_encoded(path + "#5", seed=1) == num_encoded(path + "#6") - 1 == 5
    assert num_encoded(copy) == 13  # its name is part of messages
    write_jsonl([*ROWS, row(99)])
    assert num_encoded() == 14
    assert num_encoded(copy) == num_encoded() == 0


class Killed(BaseException):
    pass


def test_a_killed_run_continues(make_encoder, write_jsonl, tmp_path, monkeypatch):
    path = write_jsonl(ROWS)
    expected = load_train_val(make_encoder(), [path], max_bad_rows=2)
    cache = RowCache(tmp_path / "cache")
    seen: list[str] = []

    def kill_at_tenth(row):
        seen.append(row.source)
        if len(seen) == 10:
            raise Killed

    monkeypatch.setattr(Counting, "before", staticmethod(kill_at_tenth))
    with pytest.raises(Killed):
        load_train_val(make_encoder(), [path], max_bad_rows=2, cache=cache)
    (entry,) = (tmp_path / "cache").iterdir()
    assert len(list(entry.glob("*.safetensors"))) == 3  # 9 rows of the file
    assert not (entry / COMPLETE).exists()
    for _ in range(2):
        data = load_train_val(make_encoder(), [path], max_bad_rows=2, cache=cache)
        assert (data.digest, data.report) == (expected.digest, expected.report)
    lines = [int(source.rpartition(":")[2]) for source in seen[10:]]
    assert lines == [10, 11, 12, 13, 14]


def test_runs_at_the_same_time_write_the_same_files(make_encoder, write_jsonl, tmp_path, monkeypatch):
    path = write_jsonl(ROWS)
    cache = RowCache(tmp_path / "cache")
    digests: list[str] = []

    def load():
        digests.append(load_train_val(make_encoder(), [path], max_bad_rows=2, cache=cache).digest)

    calls: list[str] = []

    def run_another(row):
        calls.append(row.source)
        if len(calls) == 8:
            load()

    load_expected = load_train_val(make_encoder(), [path], max_bad_rows=2).digest
    monkeypatch.setattr(Counting, "before", staticmethod(run_another))
    load()
    assert digests == [load_expected] * 2
    (entry,) = (tmp_path / "cache").iterdir()
    assert len(list(entry.iterdir())) == 6  # five parts of 14 rows, and nothing incomplete


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other_types(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"I32"', b'"F32"'))


DAMAGE = {
    "flipped bit": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "dtype": other_types,
    "exchanged": lambda path: path.write_bytes(path.with_name("00000.safetensors").read_bytes()),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_written_again(make_encoder, write_jsonl, tmp_path, counted, damage):
    path = write_jsonl(ROWS)
    cache = RowCache(tmp_path / "cache")
    expected = load_train_val(make_encoder(), [path], max_bad_rows=2, cache=cache)
    (entry,) = (tmp_path / "cache").iterdir()
    DAMAGE[damage](entry / "00002.safetensors")
    counted.clear()
    for _ in range(2):
        data = load_train_val(make_encoder(), [path], max_bad_rows=2, cache=cache)
        assert (data.digest, data.report) == (expected.digest, expected.report)
    assert [int(source.rpartition(":")[2]) for source in counted] == list(range(7, 15))


@pytest.mark.parametrize("name", ["num_sequences", "num_samples", "lengths", "channels"])
def test_numbers_outside_of_the_arrays_are_found(make_encoder, write_jsonl, name):
    samples = load_train_val(make_encoder(), [write_jsonl(ROWS)], max_bad_rows=2).train
    assert isinstance(samples, Samples)
    for part in samples.rows.parts:
        assert part.is_consistent()
        for value in (-2, 1000):
            wrong = part.columns[name].copy()
            wrong[0] = value
            assert not replace(part, columns={**part.columns, name: wrong}).is_consistent()


def test_a_full_or_read_only_disk_names_the_option(make_encoder, write_jsonl, tmp_path, monkeypatch):
    path = write_jsonl(ROWS)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        load_train_val(make_encoder(), [path], max_bad_rows=2, cache=RowCache(tmp_path / "file" / "cache"))
    assert mentions(str(caught.value), f"--dataset_cache {tmp_path}/file/cache")
    with pytest.raises(UserError) as caught:
        load_train_val(make_encoder(), [path], max_bad_rows=2, cache=RowCache(tmp_path / "file"))
    assert mentions(str(caught.value), f"--dataset_cache {tmp_path}/file")
    assert mentions(caught.value.hint, "directory")

    def full(path, content, writer=""):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(row_cache, "atomic_write", full)
    with pytest.raises(UserError) as caught:
        load_train_val(make_encoder(), [path], max_bad_rows=2, cache=RowCache(tmp_path / "cache"))
    assert mentions(str(caught.value), f"--dataset_cache {tmp_path}/cache")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_file_of_another_user_is_not_replaced(make_encoder, write_jsonl, tmp_path, monkeypatch):
    path = write_jsonl(ROWS)
    cache = RowCache(tmp_path / "cache")
    load_train_val(make_encoder(), [path], max_bad_rows=2, cache=cache)

    def denied(path, *args):  # as if this user must not read the file; root can read every file
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(np, "memmap", denied)
    before = {name: name.read_bytes() for name in cache.directory.rglob("*.*")}
    with pytest.raises(UserError) as caught:
        load_train_val(make_encoder(), [path], max_bad_rows=2, cache=cache)
    assert mentions(str(caught.value), str(next(cache.directory.rglob("00000.safetensors"))))
    assert mentions(caught.value.hint, "--dataset_cache")
    assert {name: name.read_bytes() for name in cache.directory.rglob("*.*")} == before


def test_columns_have_the_dtypes_of_files():
    assert set(COLUMNS.values()) <= set(row_cache._DTYPES)


def test_a_file_that_changes_after_tokenizing_is_reported(make_encoder, write_jsonl):
    path = write_jsonl(ROWS)
    data = load_train_val(make_encoder(), [path], split_dataset_ratio=0.3, max_bad_rows=2)
    write_jsonl([row(1)])
    with pytest.raises(UserError) as caught:
        list(data.val_conversations)
    assert mentions(str(caught.value), path)
