"""Test checkpoints: a checkpoint with its final name is complete, and damaged files are reported."""

import dataclasses
import errno
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import time
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.planner import WriteItemType

from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.base.log import logger
from swiftlite.base.lora import Lora
from swiftlite.families.resolved import resolve
from swiftlite.model.gpt import GPTModel
from swiftlite.model.open import open_model
from swiftlite.store.manifest import sha256
from swiftlite.train.checkpoint.checkpointer import (
    Checkpointer,
    load_checkpoint,
    resolve_checkpoint,
    sharded_model,
)
from swiftlite.train.checkpoint.files import SaveStrategy
from swiftlite.train.checkpoint.state import CheckpointState
from tests.evil import Evil
from tests.messages import has_line, mentions, naming
from tests.tiny import make_tiny_hf

STATE = CheckpointState(step=0, mtp_num_layers=1, torch_dtype="float32")
STREAM = {
    "num_read": 7,
    "piece": 1,
    "rows_per_epoch": [0],
    "num_kept": [6],
    "num_bad": 1,
    "waiting": [[5, 0, 30], [7, 0, 20]],
    "ready": [[[3, 1, 8]], []],
}


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory):
    return resolve(make_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3", depth=1))


@pytest.fixture
def open_chunks(hf_model, mesh):
    """Return a function that returns another copy of the same model each time."""

    def open_chunks(heads: Heads = Heads(1), seed: int = 42) -> list[GPTModel]:
        mtp_init = "checkpoint" if heads.layers == 1 else "random"
        chunks, _ = open_model(hf_model, mesh, dtype=torch.float32, heads=heads, mtp_init=mtp_init, seed=seed)
        return chunks

    return open_chunks


@pytest.fixture
def saved(open_chunks, mesh, tmp_path) -> Path:
    """Write a complete checkpoint of step 1."""
    Checkpointer(tmp_path, mesh, open_chunks(), None, STATE).save(1)
    return tmp_path / "checkpoint-1"


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def of_first_release(checkpoint: Path) -> None:
    """Turn a checkpoint into one of the first releases, which has no digests and no version."""
    (checkpoint / "SHA256SUMS").unlink()
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["version"]
    path.write_text(json.dumps(state))


def test_weights_and_state_come_back(open_chunks, mesh, tmp_path):
    (chunk,) = chunks = open_chunks()
    expected = {name: torch.randn_like(parameter) for name, parameter in chunk.named_parameters()}
    chunk.load_state_dict(expected, strict=False)
    Checkpointer(tmp_path, mesh, chunks, None, STATE).save(3, {"stream": STREAM})
    assert names(tmp_path) == {"checkpoint-3"}
    assert CheckpointState.read(tmp_path / "checkpoint-3") == dataclasses.replace(STATE, step=3, stream=STREAM)

    (other,) = fresh = open_chunks()
    load_checkpoint(tmp_path / "checkpoint-3", mesh, fresh)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in other.named_parameters())


def test_heads_may_stay_as_they_are(open_chunks, mesh, tmp_path):
    (chunk,) = chunks = open_chunks()
    for parameter in chunk.parameters():
        torch.nn.init.zeros_(parameter)
    Checkpointer(tmp_path, mesh, chunks, None, STATE).save(1)
    (other,) = fresh = open_chunks()
    load_checkpoint(tmp_path / "checkpoint-1", mesh, fresh, with_heads=False)
    for name, parameter in other.named_parameters():
        assert bool(parameter.any()) == name.startswith("mtp."), name


@pytest.mark.parametrize(("keep", "left"), [(None, {1, 2, 10}), (2, {2, 10}), (1, {10})])
def test_the_newest_are_kept(open_chunks, mesh, tmp_path, keep, left):
    (tmp_path / "checkpoint-best").mkdir()  # somebody else's
    checkpointer = Checkpointer(tmp_path, mesh, open_chunks(), None, STATE, keep=keep)
    for step in (1, 2, 10):
        checkpointer.save(step)
    assert names(tmp_path) == {"checkpoint-best"} | {f"checkpoint-{step}" for step in left}
    assert resolve_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_a_checkpoint_without_all_tensors_gets_no_name(open_chunks, mesh, tmp_path):
    chunks = open_chunks()
    checkpointer = Checkpointer(tmp_path, mesh, chunks, None, dataclasses.replace(STATE, data=object()))
    with pytest.raises(TypeError):
        checkpointer.save(1)
    assert names(tmp_path) == set()
    (tmp_path / ".checkpoint-1.writing").mkdir()  # as a killed process leaves it
    Checkpointer(tmp_path, mesh, chunks, None, STATE).save(2)
    assert names(tmp_path) == {"checkpoint-2"}  # what was left of the other is gone


def test_what_a_killed_run_left_is_cleaned_up(open_chunks, mesh, tmp_path):
    checkpointer = Checkpointer(tmp_path, mesh, open_chunks(), None, STATE, keep=2)
    for number in (1, 2, 10):
        (tmp_path / f"checkpoint-{number}").mkdir()
    (tmp_path / ".checkpoint-3.writing").mkdir()
    (tmp_path / ".checkpoint-1.deleting").mkdir()
    checkpointer.clean_up()
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-10"}


def test_a_checkpoint_that_is_deleted_loses_its_name_first(open_chunks, mesh, tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, mesh, open_chunks(), None, STATE, keep=1)
    checkpointer.save(1)

    def interrupted(directory: Path) -> None:
        (directory / "metadata.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(2)
    assert names(tmp_path) == {".checkpoint-1.deleting", "checkpoint-2"}
    checkpointer.clean_up()
    assert names(tmp_path) == {"checkpoint-2"}


def test_a_checkpoint_is_on_disk_before_it_has_its_name(open_chunks, mesh, tmp_path, synced):
    """All files are flushed before the directory is renamed, because a power failure could
    otherwise leave empty files.
    """
    Checkpointer(tmp_path, mesh, open_chunks(), None, STATE).save(1)
    *before, last = synced
    writing = tmp_path / ".checkpoint-1.writing"
    assert {writing, *(writing / name for name in names(tmp_path / "checkpoint-1"))} <= set(before)
    assert last == tmp_path


def test_a_rank_flushes_and_hashes_its_own_files(open_chunks, mesh, tmp_path, synced):
    """A flush by the first rank has no effect on files that were written on another machine.

    Without the digests of all ranks, the first rank would read the whole checkpoint while the other ranks wait.
    """
    strategy: Any = SaveStrategy()
    dist_checkpointing.save(sharded_model(open_chunks(), mesh), str(tmp_path), strategy)
    files = {path.name for path in tmp_path.glob("__0_*.distcp")}
    assert "__0_0.distcp" in files
    assert files <= {path.name for path in synced}
    assert strategy.written.digests == {name: sha256(tmp_path / name) for name in files}


def test_a_checkpoint_that_cannot_be_deleted_is_no_failure_of_the_save(open_chunks, mesh, tmp_path):
    elsewhere = tmp_path.with_name("elsewhere")
    elsewhere.mkdir()
    (tmp_path / "checkpoint-1").symlink_to(elsewhere)
    checkpointer = Checkpointer(tmp_path, mesh, open_chunks(), None, STATE, keep=1)
    checkpointer.save(2)
    assert names(tmp_path) == {"checkpoint-2"}
    assert elsewhere.is_dir()


def test_what_cannot_be_deleted_is_said(open_chunks, mesh, tmp_path, caplog, monkeypatch):
    def busy(directory: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy")

    checkpointer = Checkpointer(tmp_path, mesh, open_chunks(), None, STATE, keep=1)
    checkpointer.save(1)
    monkeypatch.setattr(shutil, "rmtree", busy)
    logger.propagate = True
    checkpointer.save(2)
    assert names(tmp_path) == {".checkpoint-1.deleting", "checkpoint-2"}
    assert has_line(caplog.text, "checkpoint-1 Device or resource busy")


def test_a_step_that_is_saved_again_replaces_the_first(open_chunks, mesh, tmp_path):
    chunks = open_chunks()
    Checkpointer(tmp_path, mesh, chunks, None, dataclasses.replace(STATE, images=True)).save(1)
    (tmp_path / "checkpoint-1" / "note.txt").write_text("of the first")
    Checkpointer(tmp_path, mesh, chunks, None, STATE).save(1)
    assert not CheckpointState.read(tmp_path / "checkpoint-1").images
    assert not (tmp_path / "checkpoint-1" / "note.txt").exists()


def test_a_checkpoint_is_found_by_itself_and_in_its_run(open_chunks, mesh, tmp_path):
    with pytest.raises(UserError, match=naming(f"{tmp_path} checkpoint-N")):
        resolve_checkpoint(tmp_path)
    Checkpointer(tmp_path, mesh, open_chunks(), None, STATE).save(4)
    assert resolve_checkpoint(tmp_path) == resolve_checkpoint(tmp_path / "checkpoint-4") == tmp_path / "checkpoint-4"


@pytest.mark.parametrize("content", ["", "{", "[]", None])
def test_a_state_that_cannot_be_read_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(UserError, match=naming("trainer_state.json")):
        CheckpointState.read(tmp_path)


def test_a_damaged_file_is_named(open_chunks, mesh, saved):
    of_first_release(saved)
    file = next(saved.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=naming("checkpoint-1 --resume")):
        load_checkpoint(saved, mesh, open_chunks())


def test_another_model_is_named(open_chunks, mesh, tmp_path):
    Checkpointer(tmp_path, mesh, open_chunks(), None, STATE).save(1)
    with pytest.raises(UserError, match=r"checkpoint-1.*mtp"):
        load_checkpoint(tmp_path / "checkpoint-1", mesh, open_chunks(Heads(2)))


def test_the_state_is_json_that_a_person_can_read(open_chunks, mesh, tmp_path):
    Checkpointer(tmp_path, mesh, open_chunks(), None, STATE).save(7)
    text = (tmp_path / "checkpoint-7" / "trainer_state.json").read_text()
    assert text == json.dumps(dataclasses.asdict(dataclasses.replace(STATE, step=7)), indent=2)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{}", "step:"),
        ("[]", ""),
        ({"step": None}, "step:"),
        ({"step": "1"}, "step:"),
        ({"step": 1.5}, "step:"),
        ({"step": -1}, "step: 0"),
        ({"step": 2}, "2 1"),
        ({"version": 2, "torch_dtype": "float8"}, "version 2"),
        ({"mtp_num_layers": "1"}, "mtp_num_layers:"),
        ({"mtp_num_layers": -1}, "mtp_num_layers: 0"),
        ({"torch_dtype": "load"}, "torch_dtype: 'bfloat16'"),
        ({"stream": {"num_read": 1}}, "stream.piece:"),
        ({"stream": {**STREAM, "waiting": [[3, 0, -1]]}}, "stream.waiting.0.2:"),
        ({"stream": {**STREAM, "waiting": [[3, 0]]}}, "stream.waiting.0: 3 2"),
        ({"stream": {**STREAM, "waiting": [[3, 0, 1, 2]]}}, "stream.waiting.0: 3 4"),
        ("[" * 100_000, "100"),
    ],
)
def test_a_state_that_cannot_be_is_named(tmp_path, content, problem):
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    written = {"step": 1, "mtp_num_layers": 1, "torch_dtype": "float32"}
    text = content if isinstance(content, str) else json.dumps(written | content)
    (checkpoint / "trainer_state.json").write_text(text)
    with pytest.raises(UserError, match=naming("checkpoint-1/trainer_state.json")) as error:
        CheckpointState.read(checkpoint)
    assert mentions(error.value.problem, problem)
    assert "\n" not in error.value.problem


@pytest.mark.parametrize(
    ("content", "streams_trunk"),
    [
        ({}, True),
        ({"streams_trunk": False, "quantized_trunk": True}, False),
        ({"lora": dataclasses.asdict(Lora(4, 8.0))}, False),
    ],
)
def test_a_base_without_adapters_was_a_streamed_trunk_in_the_first_release(tmp_path, content, streams_trunk):
    written = {"step": 1, "mtp_num_layers": 1, "torch_dtype": "float32", "base": {"model": "m", "sha256": "0"}}
    (tmp_path / "trainer_state.json").write_text(json.dumps(written | content))
    state = CheckpointState.read(tmp_path)
    assert state.streams_trunk == streams_trunk
    assert state.quantized_trunk == content.get("quantized_trunk", False)
    assert state.lora == (Lora(4, 8.0) if "lora" in content else None)


def test_every_file_has_its_digest_and_sha256sum_knows_them(saved):
    listed = {line.split("  ")[1] for line in (saved / "SHA256SUMS").read_text().splitlines()}
    assert listed == names(saved) - {"SHA256SUMS"}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=saved, check=True, capture_output=True)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "common.pt", "trainer_state.json"])
def test_one_other_bit_is_noticed(open_chunks, mesh, saved, file):
    content = bytearray((saved / file).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / file).write_bytes(content)
    with pytest.raises(UserError, match=naming(f"checkpoint-1 sha256 {file}")):
        load_checkpoint(saved, mesh, open_chunks())


def test_a_manifest_that_is_damaged_or_names_what_is_gone(open_chunks, mesh, saved):
    (saved / "common.pt").unlink()
    with pytest.raises(UserError, match=naming("checkpoint-1 sha256 common.pt")):
        load_checkpoint(saved, mesh, open_chunks())
    (saved / "SHA256SUMS").write_text("0  ../../etc/passwd\n")
    with pytest.raises(UserError, match=r"checkpoint-1.*SHA256SUMS.*passwd'"):
        load_checkpoint(saved, mesh, open_chunks())


def test_a_manifest_lists_every_file(open_chunks, mesh, saved):
    """Files that are not listed in the manifest would be read without verification."""
    lines = (saved / "SHA256SUMS").read_text().splitlines(keepends=True)
    (saved / "SHA256SUMS").write_text("".join(line for line in lines if "__0_0.distcp" not in line))
    with pytest.raises(UserError, match=naming("checkpoint-1 SHA256SUMS __0_0.distcp")):
        load_checkpoint(saved, mesh, open_chunks())
    (saved / "SHA256SUMS").write_text("")
    with pytest.raises(UserError, match=naming("checkpoint-1 SHA256SUMS .metadata")):
        load_checkpoint(saved, mesh, open_chunks())


def test_a_common_file_that_is_cut_short(open_chunks, mesh, saved):
    of_first_release(saved)
    (saved / "common.pt").write_bytes(b"PK\3\4 and no more")
    with pytest.raises(UserError, match=naming("checkpoint-1 --resume")):
        load_checkpoint(saved, mesh, open_chunks())


def test_a_checkpoint_from_before_there_were_digests(open_chunks, mesh, saved, caplog):
    caplog.set_level("INFO", logger=logger.name)
    logger.propagate = True
    load_checkpoint(saved, mesh, open_chunks())
    assert not has_line(caplog.text, "checkpoint-1")
    of_first_release(saved)
    load_checkpoint(saved, mesh, open_chunks())
    assert has_line(caplog.text, "checkpoint-1 SHA256SUMS")


def test_a_checkpoint_that_lost_its_digests_is_not_trusted(open_chunks, mesh, saved):
    (saved / "SHA256SUMS").unlink()
    with pytest.raises(UserError, match=naming("checkpoint-1 SHA256SUMS")):
        load_checkpoint(saved, mesh, open_chunks())


def test_an_older_checkpoint_of_the_run_has_digests(open_chunks, mesh, saved):
    of_first_release(shutil.copytree(saved, saved.with_name("checkpoint-2")))
    with pytest.raises(UserError, match=naming("checkpoint-2 SHA256SUMS")):
        load_checkpoint(saved.with_name("checkpoint-2"), mesh, open_chunks())


def test_code_in_the_metadata_does_not_run(open_chunks, mesh, saved, tmp_path):
    of_first_release(saved)
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(UserError, match=naming("checkpoint-1 .metadata")):
        load_checkpoint(saved, mesh, open_chunks())
    assert not (tmp_path / "ran").exists()


class _ByName(pickle.Pickler):
    """Pickles members of enums as Python 3.11.2 does."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_a_checkpoint_that_python_3_11_2_wrote(open_chunks, mesh, saved):
    of_first_release(saved)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    with (saved / ".metadata").open("wb") as file:
        _ByName(file).dump(metadata)
    assert b"getattr" in (saved / ".metadata").read_bytes()
    load_checkpoint(saved, mesh, open_chunks())


def test_a_class_that_the_metadata_only_names(open_chunks, mesh, saved):
    of_first_release(saved)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.planner_data = subprocess.Popen
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=naming("checkpoint-1 .metadata subprocess.Popen")):
        load_checkpoint(saved, mesh, open_chunks())


class Method:
    def __reduce__(self) -> Any:
        return getattr, (Path, "home")


def test_no_other_attribute_is_taken(open_chunks, mesh, saved):
    of_first_release(saved)
    (saved / ".metadata").write_bytes(pickle.dumps(Method()))
    with pytest.raises(UserError, match=naming(".metadata 'home'")):
        load_checkpoint(saved, mesh, open_chunks())


def test_an_enum_that_the_pickle_changes(open_chunks, mesh, saved):
    """The opcode BUILD of a pickle can set attributes of a class. `getattr` could then return another object."""
    of_first_release(saved)
    enum = b"ctorch.distributed.checkpoint.planner\nWriteItemType\n"
    changes = b"}(V_member_map_\n}(V__init__\n" + enum + b"uu"  # {"_member_map_": {"__init__": WriteItemType}}
    build = enum + b"N" + changes + b"\x86b0"
    member = b"cbuiltins\ngetattr\n" + enum + b"V__init__\n\x86R."
    (saved / ".metadata").write_bytes(b"\x80\x02" + build + member)
    before = WriteItemType._member_map_
    try:
        with pytest.raises(UserError, match=naming(".metadata '__init__'")):
            load_checkpoint(saved, mesh, open_chunks())
        assert "__init__" in WriteItemType.__members__
    finally:
        type.__setattr__(WriteItemType, "_member_map_", before)


def test_code_in_what_is_no_tensor_does_not_run(open_chunks, mesh, saved, tmp_path):
    """torch would load such objects with weights_only=False. Damaged files are still detected."""
    of_first_release(saved)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if "_extra_state" in index.fqn)
    torch.save(Evil(tmp_path / "ran"), saved / "evil")
    size = (saved / "evil").stat().st_size
    metadata.storage_data[index] = dataclasses.replace(
        metadata.storage_data[index], relative_path="evil", offset=0, length=size
    )
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    load_checkpoint(saved, mesh, open_chunks())
    assert not (tmp_path / "ran").exists()
    metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], relative_path="../evil")
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=naming("'../evil'")):
        load_checkpoint(saved, mesh, open_chunks())


def test_code_in_the_common_file_does_not_run(open_chunks, mesh, saved, tmp_path):
    of_first_release(saved)
    torch.save(Evil(tmp_path / "ran"), saved / "common.pt")
    with pytest.raises(UserError, match=naming("checkpoint-1")) as error:
        load_checkpoint(saved, mesh, open_chunks())
    assert "\n" not in error.value.problem
    assert not (tmp_path / "ran").exists()
    (saved / "common.pt").unlink()
    with pytest.raises(UserError, match=naming("checkpoint-1")):
        load_checkpoint(saved, mesh, open_chunks())


def test_an_asynchronous_save_waits_for_the_one_before(open_chunks, mesh, tmp_path):
    """A save deletes incomplete files, which must not include those of the previous save."""
    checkpointer = Checkpointer(tmp_path, mesh, open_chunks(), None, STATE, is_async=True)
    checkpointer.save(1)
    checkpointer.save(2)
    assert names(tmp_path) == {"checkpoint-1", ".checkpoint-2.writing"}
    checkpointer.finish()
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2"}


def test_signals_do_not_end_the_writer_of_an_asynchronous_save(open_chunks, mesh, tmp_path, monkeypatch):
    """Terminals and batch systems send signals to all processes, but only the trainer decides when the run ends."""
    run, sent = tmp_path / "run", tmp_path / "sent"
    fsync = os.fsync

    def wait_for_signals(descriptor: int) -> None:
        while not sent.exists():
            time.sleep(0.01)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", wait_for_signals)
    checkpointer = Checkpointer(run, mesh, open_chunks(), None, STATE, is_async=True)
    of_other_tests = set(multiprocessing.active_children())
    checkpointer.save(1)
    (writer,) = set(multiprocessing.active_children()) - of_other_tests
    while not list(run.glob("*/*.distcp")):
        assert writer.is_alive()
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(writer.pid or 0, number)
    sent.touch()
    checkpointer.finish()
    assert names(run) == {"checkpoint-1"}


def save_and_wait(checkpointer: Checkpointer, step: int, data_state: dict[str, Any] | None = None) -> None:
    checkpointer.save(step, data_state)
    checkpointer.finish()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("limit", "data_state"),
    [(100_000, {}), (10_000_000, {"data": {"rows": "x" * 10_000_000}})],
    ids=["tensors", "state"],
)
def test_what_cannot_be_written_is_not_left(open_chunks, mesh, tmp_path, limit, data_state, is_async):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpointer = Checkpointer(tmp_path, mesh, open_chunks(), None, STATE, is_async=is_async)
    checkpointer.save(1)
    checkpointer.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(UserError, match=rf"{tmp_path}: .*File too large"):
            save_and_wait(checkpointer, 2, data_state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == {"checkpoint-1"}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_disk_is_called_so_and_has_room_again(open_chunks, mesh, tmp_path, is_async):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount")
    try:
        checkpointer = Checkpointer(small, mesh, open_chunks(), None, STATE, is_async=is_async)
        with pytest.raises(UserError, match=rf"{small}: .*No space left on device") as error:
            save_and_wait(checkpointer, 1)
        assert "\n" not in error.value.problem
        assert names(small) == set()
    finally:
        subprocess.run(["umount", small], check=True)
