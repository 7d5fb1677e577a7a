"""Test files of records with several writers, writers that are killed, full disks, and many entries."""

import hashlib
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swiftlite.train import record_files
from swiftlite.train.record_files import DamagedRecord, RecordFiles

WRITER = """
import itertools, sys
from pathlib import Path
from swiftlite.train.record_files import RecordFiles
from tests.train.test_record_files import content_of, key_of
files = RecordFiles(Path(sys.argv[1]), "part")
for number in itertools.count():
    files.add(key_of(int(sys.argv[2]), number), content_of(int(sys.argv[2]), number))
    print(number, flush=True)
"""


def key_of(writer: int, number: int) -> bytes:
    return hashlib.sha256(f"{writer} {number}".encode()).digest()[:16]


def content_of(writer: int, number: int) -> bytes:
    return key_of(number, writer) * (1 + number % 3000)


def test_writers_that_are_killed_lose_no_finished_record(tmp_path):
    here = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*here, str(number)], stdout=subprocess.PIPE, text=True) for number in range(3)]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()  # it has begun
    reader = RecordFiles(tmp_path, "part")
    assert reader.read(key_of(1, 0)) == content_of(1, 0)
    time.sleep(0.5)
    for number, writer in enumerate(writers):
        writer.send_signal(signal.SIGKILL)
        output, _ = writer.communicate()
        numbers = range(1 + int(output.split("\n")[-2] or 0))
        assert len(numbers) > 10
        assert all(reader.read(key_of(number, each)) == content_of(number, each) for each in numbers)
        assert reader.read(key_of(number, len(numbers) + 1)) is None
    assert len(list(tmp_path.iterdir())) == 2 * len(writers)
    assert RecordFiles(tmp_path, "other").read(key_of(1, 0)) is None


@pytest.mark.parametrize("opened", ["before", "after"])
def test_many_entries_are_sorted_in_parts(tmp_path, monkeypatch, opened):
    monkeypatch.setattr(record_files, "RUN_ENTRIES", 50)
    monkeypatch.setattr(record_files, "RECENT_ENTRIES", 7)
    reader = RecordFiles(tmp_path, "part")
    writers = [RecordFiles(tmp_path, "part") for _ in range(2)]
    for number in range(200):
        if opened == "before":
            assert key_of(0, number) not in reader
        writers[number % 2].add(key_of(0, number), content_of(0, number))
    assert all(reader.read(key_of(0, number)) == content_of(0, number) for number in range(200))
    assert max(len(halves) for halves, _ in reader._runs) <= 50
    assert sum(len(halves) for halves, _ in reader._runs) + len(reader._recent) == 200


def test_a_damaged_record_is_removed_for_all(tmp_path):
    writer, reader = RecordFiles(tmp_path, "part"), RecordFiles(tmp_path, "part")
    for number in range(3):
        writer.add(key_of(0, number), content_of(0, number))
    (data,) = tmp_path.glob("*.data")
    content = data.read_bytes()
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DamagedRecord, match=data.name):
        reader.read(key_of(0, 2))
    assert key_of(0, 2) not in writer
    assert key_of(0, 1) in writer
    reader.add(key_of(0, 2), content_of(0, 2))
    assert writer.read(key_of(0, 2)) == RecordFiles(tmp_path, "part").read(key_of(0, 2)) == content_of(0, 2)


@pytest.mark.parametrize("full", [".data", ".index"])
def test_a_full_disk_keeps_the_records_before(tmp_path, full):
    files = RecordFiles(tmp_path, "part")
    files.add(key_of(0, 0), bytes(10))
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    content = bytes(200 if full == ".data" else 20)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60, hard))
        with pytest.raises(OSError):
            files.add(key_of(0, 1), content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert {path.suffix: path.stat().st_size for path in tmp_path.iterdir()}[full] == {".data": 10, ".index": 48}[full]
    files.add(key_of(0, 1), content)
    assert files.read(key_of(0, 0)) == bytes(10)
    assert files.read(key_of(0, 1)) == content


def test_files_that_are_gone_hold_no_records(tmp_path):
    files = RecordFiles(tmp_path, "part")
    files.add(key_of(0, 0), bytes(10))
    for path in tmp_path.glob("*.index"):
        path.unlink()
    assert files.read(key_of(0, 0)) is None
    files.add(key_of(0, 1), bytes(20))
    assert RecordFiles(Path(tmp_path), "part").read(key_of(0, 1)) == bytes(20)
