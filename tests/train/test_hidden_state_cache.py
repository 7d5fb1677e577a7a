"""Test that a run with cached trunk states gives bitwise identical results, and reads only its own states."""

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftlite.args.commands import SftArgs
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.data import encoded_rows
from swiftlite.data.encoded_rows import (
    COLUMNS,
    ROW_COLUMNS,
    SEQUENCE_COLUMNS,
    EncodedRows,
    Part,
    PartFacts,
    Samples,
    keys_of,
)
from swiftlite.data.rows.sources import DataFile
from swiftlite.data.sample import digest
from swiftlite.model.gpt import GPTModel
from swiftlite.plan.kernels import Machine
from swiftlite.plan.run import make_plan
from swiftlite.train import hidden_state_cache
from swiftlite.train import run as training
from swiftlite.train.batches import micro_batches
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.hidden_state_cache import _DistinctRows
from tests.messages import naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.cached_states import ENTRY, records, remove, size_of
from tests.train.test_sft import metrics, train

HEADS = {"mtp_mode": "heads_only", "micro_batch_size": 1, "num_train_epochs": 2, "train_iters": None}
HEADS |= {"split_dataset_ratio": 0.4}  # a global batch is held out, so that there is no padding
NUM_ROWS = 10


@pytest.fixture
def options(options):
    """Return options of a run on `NUM_ROWS` rows."""
    path = Path(options().dataset[0])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:NUM_ROWS]))
    return options


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """Return a list that gets an entry for each pass of the trunk's layers over a micro-batch."""
    counted = []
    forward_decoder = GPTModel.forward_decoder

    def count(self, *args, **kwargs):
        counted.append(1)
        return forward_decoder(self, *args, **kwargs)

    monkeypatch.setattr(GPTModel, "forward_decoder", count)
    return counted


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "unrolled in bfloat16": (
        "qwen3",
        {"torch_dtype": "bfloat16", "packing": True, "max_length": 128, "mtp_unroll": 2},
    ),
    "mimo": ("mimo", {"packing": True, "max_length": 128}),
    "glm4_moe": ("glm4_moe", {"mtp_loss": "lk_hybrid"}),
    "qwen3_next": ("qwen3_next", {"padding_free": True, "draft_vocab": 40}),
}
ON_GPU = Machine(is_cuda=True)
"""A machine for which kernels are fused. Fused kernels also run on a CPU."""


@pytest.mark.parametrize("way", some_of(WAYS, "unrolled in bfloat16", "qwen3_next"))
def test_what_is_read_is_what_would_be_computed(options, mesh, tmp_path, passes, way):
    check_that_nothing_changes(options, mesh, tmp_path, passes, *WAYS[way])


@pytest.mark.parametrize(
    "more",
    [pytest.param({}, id="ce", marks=pytest.mark.slow), pytest.param({"mtp_loss": "kl", "draft_vocab": 40}, id="kl")],
)
def test_nor_with_fused_kernels(options, mesh, tmp_path, passes, monkeypatch, more):
    monkeypatch.setattr(training, "this_machine", lambda *_: ON_GPU)
    check_that_nothing_changes(options, mesh, tmp_path, passes, "qwen3", more)
    monkeypatch.undo()
    args = options(output_dir=str(tmp_path / "unfused"), **HEADS, cache_trunk_states=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=naming(f"--cache_trunk_states {tmp_path / 'cache'} kernels")):
        train(args, mesh)


def check_that_nothing_changes(options, mesh, tmp_path, passes, family, more) -> None:
    model = make_tiny_hf(tmp_path / family, family, depth=1, with_tokenizer=True)

    def run(name: str, **changed) -> tuple[list[dict], int]:
        passes.clear()
        run = train(options(model=str(model), output_dir=str(tmp_path / name), **HEADS | more | changed), mesh)
        return metrics(run), len(passes)

    cache = str(tmp_path / "cache")
    plain, all_passes = run("plain")
    written, first_passes = run("written", cache_trunk_states=cache)
    read, no_passes = run("read", cache_trunk_states=cache)
    assert plain == written == read
    assert no_passes == 0
    assert first_passes == len(records(tmp_path / "cache")) < all_passes
    for file in (tmp_path / "plain").glob("checkpoint-*/*.distcp"):
        assert file.read_bytes() == (tmp_path / "read" / file.relative_to(tmp_path / "plain")).read_bytes()
    changed, no_passes = run("changed", cache_trunk_states=cache, mtp_loss="tv")
    assert (len(changed), no_passes) == (len(plain), 0)


@pytest.mark.slow
def test_rows_keep_their_states_in_another_order(options, mesh, tmp_path, passes):
    """The seed selects the held-out rows, so another seed uses the same rows in other roles."""
    cached = HEADS | {"cache_trunk_states": str(tmp_path / "cache")}
    train(options(output_dir=str(tmp_path / "first"), **cached), mesh)
    passes.clear()
    train(options(output_dir=str(tmp_path / "second"), seed=7, mtp_loss="nla", mtp_unroll=3, **cached), mesh)
    assert passes == []


def test_a_run_that_was_stopped_while_it_wrote_goes_on(options, mesh, tmp_path, passes):
    cache = tmp_path / "cache"
    args = options(**HEADS, cache_trunk_states=str(cache))
    plain = metrics(train(args, mesh))
    written = records(cache)
    assert len(written) == NUM_ROWS
    assert len(list(cache.iterdir())) == 3  # cache.json, and the files of one writer
    remove(cache, set(list(written)[::2]))
    (index,) = cache.glob("*.index")
    with index.open("ab") as file:
        file.write(b"half an entry")
    with index.with_suffix(".data").open("ab") as file:
        file.write(b"half a record")
    shutil.rmtree(args.output_dir)
    passes.clear()
    assert metrics(train(args, mesh)) == plain
    assert len(passes) == NUM_ROWS // 2
    assert records(cache) == written


@pytest.mark.parametrize("family", some_of(["qwen3", "mimo"], "mimo"))
def test_the_disk_must_have_room_for_padding(options, mesh, tmp_path, monkeypatch, family):
    """On a GPU rows are padded to multiples of 64 tokens, so the cache has three times the tokens of the rows."""
    monkeypatch.setattr(training, "this_machine", lambda *_: ON_GPU)
    model = make_tiny_hf(tmp_path / family, family, depth=1, with_tokenizer=True)
    rows = [json.dumps({"query": f"What is {n}?", "response": f"It is {n}."}) for n in (0, *range(11))]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    args = options(
        model=str(model),
        dataset=[str(tmp_path / "rows.jsonl")],
        **HEADS | {"split_dataset_ratio": 0.3, "num_train_epochs": 1},
        cache_trunk_states=str(tmp_path / "cache"),
    )

    def train_with(free: int) -> int:
        """Train with `free` bytes of free disk space; return the number of written bytes."""
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        shutil.rmtree(args.output_dir, ignore_errors=True)
        monkeypatch.setattr(shutil, "disk_usage", lambda directory: shutil._ntuple_diskusage(10**9, 0, free))
        train(args, mesh)
        return size_of(tmp_path / "cache")

    written = train_with(10**9)
    with pytest.raises(UserError, match=naming(f"--cache_trunk_states {tmp_path / 'cache'} GB")):
        train_with(written - 1)
    # A few bytes more are counted than the header of a record has.
    assert train_with(int(written * 1.002)) == written


def test_other_states_are_refused(options, mesh, tmp_path, hf_dir, monkeypatch):
    cache = tmp_path / "cache"

    def refused(words: str, **changed) -> None:
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        args = options(output_dir=str(tmp_path / "again"), **HEADS | {"cache_trunk_states": str(cache)} | changed)
        with pytest.raises(UserError, match=words):
            train(args, mesh)

    cache.mkdir()
    (cache / "notes.txt").write_text("mine")
    refused("cache is not empty, and has no cache.json")
    shutil.rmtree(cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda directory: shutil._ntuple_diskusage(10**6, 10**6, 100))
    refused("--cache_trunk_states .* 0.00 GB")
    monkeypatch.undo()

    train(options(**HEADS, cache_trunk_states=str(cache)), mesh)
    other_rows = tmp_path / "other.jsonl"
    other_rows.write_text('{"query": "Who?", "response": "Nobody."}\n' * 20)
    refused("written with other rows", dataset=[str(other_rows)])
    refused("written with other rows", system="Answer.")
    refused("written with other .*torch_dtype", torch_dtype="bfloat16")
    refused("written with other packing", packing=True)
    other_model = make_tiny_hf(tmp_path / "other", "qwen3", depth=1, with_tokenizer=True, seed=5)
    refused("written with other trunk's weights", model=str(other_model))
    turned = tmp_path / "turned"
    shutil.copytree(hf_dir, turned)
    config = json.loads((turned / "config.json").read_text())
    (turned / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    refused("written with other config.json", model=str(turned))
    assert not (tmp_path / "again").exists()  # a run that cannot begin leaves no directory

    manifest = json.loads((cache / "cache.json").read_text())
    del manifest["format"]  # as in earlier releases, which wrote a file per micro-batch
    (cache / "cache.json").write_text(json.dumps(manifest))
    refused("another release")
    (cache / "cache.json").write_text("{")
    refused("cache.json is damaged")


def many_samples(number: int, length: int = 12) -> Samples:
    """Return samples as they are read from files: arrays. Of each two neighbors the tokens are equal."""
    generator = np.random.RandomState(0)
    tokens = np.repeat(generator.randint(5, 1000, (number // 2, length)), 2, axis=0)
    columns: dict[str, Any] = {name: np.zeros(number) for name in SEQUENCE_COLUMNS | ROW_COLUMNS}
    columns |= {"input_ids": tokens.ravel(), "loss_scale": np.tile(np.arange(length) > 5, number)}
    columns |= {"lengths": np.full(number, length), "channels": np.full(number, -1), "numbers": np.arange(number)}
    columns |= dict.fromkeys(("num_sequences", "num_samples", "trains_heads"), np.ones(number))
    part = Part({name: values.astype(COLUMNS[name]) for name, values in columns.items()}, PartFacts())
    assert part.is_consistent()
    return EncodedRows([(DataFile(Path("rows.jsonl")), [part])]).samples_of(np.arange(number))


@pytest.mark.parametrize("packing", [False, True])
def test_what_the_cache_computes_of_all_rows_takes_few_bytes_of_each(monkeypatch, packing):
    monkeypatch.setattr(encoded_rows, "CHUNK_SAMPLES", 512)
    monkeypatch.setattr(micro_batches, "CHUNK_SAMPLES", 512)
    samples = many_samples(40_000)
    plan = make_plan(SftArgs(packing=packing, max_length=30), 1, Heads(1))
    no_flops: Any = None  # not needed, because steps are not packed separately
    batches = Batches(plan, 0, 0, no_flops)
    rows, held_out = batches.rows(samples), batches.rows(samples[:0])
    tracemalloc.start()
    keys = keys_of(samples)
    distinct = _DistinctRows.of(batches, rows, held_out)
    lengths = distinct.lengths(batches)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * len(samples)  # with samples or digests as objects, more than 1,000
    expected = {digest(row): sum(map(len, row)) for row in (rows[number] for number in range(len(rows)))}
    assert len(distinct) == len(expected)
    assert lengths.sum() == sum(expected.values())
    assert digest(distinct[7]) in expected
    assert [int(key).to_bytes(8, "little").hex() for key in keys[:9]] == [digest([each])[:16] for each in samples[:9]]


def swap_two(index: Path, data: Path) -> None:
    """Exchange the places of two records in the index."""
    content = index.read_bytes()
    first, second = content[:ENTRY], content[ENTRY : 2 * ENTRY]
    swapped = first[:16] + second[16:] + second[:16] + first[16:]
    index.write_bytes(swapped + content[2 * ENTRY :])


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], int]] = {
    "a bit": (lambda index, data: data.write_bytes(data.read_bytes()[:-9] + b"\x01" + data.read_bytes()[-8:]), 1),
    "cut": (lambda index, data: os.truncate(data, data.stat().st_size - 7), 1),
    "cut to one": (lambda index, data: os.truncate(data, data.stat().st_size // NUM_ROWS + 200), NUM_ROWS - 1),
    "empty": (lambda index, data: os.truncate(data, 0), NUM_ROWS),
    "lost": (lambda index, data: data.unlink(), NUM_ROWS),
    "exchanged": (swap_two, 2),
    "a size": (
        lambda index, data: index.write_bytes(index.read_bytes()[:24] + b"\xff" * 8 + index.read_bytes()[32:]),
        1,
    ),
}


@pytest.mark.parametrize("damage", some_of(DAMAGES, "a bit", "exchanged"))
def test_damaged_states_are_computed_again(options, mesh, tmp_path, passes, damage):
    cache = tmp_path / "cache"
    args = options(**HEADS, cache_trunk_states=str(cache))
    expected, whole = metrics(train(args, mesh)), None
    whole = records(cache)
    (index,) = cache.glob("*.index")
    change, number = DAMAGES[damage]
    change(index, index.with_suffix(".data"))
    shutil.rmtree(args.output_dir)
    passes.clear()
    found = metrics(train(args, mesh))
    assert [line for line in found if "fault" not in line] == expected
    (decision,) = (line for line in found if "fault" in line)
    assert decision["fault"] == "damaged_cache"
    assert str(cache) in decision["decision"]
    assert len(passes) == number
    shutil.rmtree(args.output_dir)
    passes.clear()
    assert metrics(train(args, mesh)) == expected  # the files are repaired
    assert passes == []
    if damage not in ("lost", "exchanged", "empty"):
        assert records(cache) == whole


def test_states_of_other_layers_are_named(tmp_path):
    written = {"format": hidden_state_cache.FORMAT, "states": "after the norm, inputs of layers 1, 3"}
    (tmp_path / hidden_state_cache.MANIFEST).write_text(json.dumps(written))
    with pytest.raises(UserError, match=naming(f"--cache_trunk_states {tmp_path} states 1, 3 2, 4")):
        hidden_state_cache._check_is_same(tmp_path, written | {"states": "after the norm, inputs of layers 2, 4"})
