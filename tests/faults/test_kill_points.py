"""Test a part of the search for kill points (`hunt.py`); the whole search is a separate command."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.hunt import build_shim, fill, places
from tests.tiers import some_of

ROOT = Path(__file__).parents[2]
COMMANDS = ["sft_async", "export", "infer"]  # regenerate writes its answers as infer does
WRITER = """
import os
with open("file", "wb", buffering=0) as file:
    file.write(b"0123456789")
    file.write(b"0123456789")
    os.fsync(file.fileno())
os.rename("file", "whole")
"""


@pytest.fixture
def hit(tmp_path):
    """Return hit(at, error), which runs WRITER with a fault at operation `at`.

    `hit` returns the finished process and the operations before the fault.
    """
    shim = build_shim(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "counter").write_bytes(bytes(8))

    def run(at: int, error: int) -> tuple[subprocess.CompletedProcess, list[str]]:
        environment = os.environ | {
            "LD_PRELOAD": str(shim),
            "FAULTS_ROOT": str(tmp_path / "out"),
            "FAULTS_COUNTER": str(tmp_path / "counter"),
            "FAULTS_LOG": str(tmp_path / "log"),
            "FAULTS_AT": str(at),
            "FAULTS_ERRNO": str(error),
        }
        command = [sys.executable, "-c", WRITER]
        process = subprocess.run(command, cwd=tmp_path / "out", env=environment, capture_output=True, text=True)
        return process, (tmp_path / "log").read_text().splitlines()

    return run


def sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir()}


def test_operations_are_counted(hit, tmp_path):
    _, operations = hit(0, 0)
    assert operations == ["1 open /file", "2 write /file", "3 write /file", "4 fsync /file", "5 rename /file"]
    assert sizes(tmp_path / "out") == {"whole": 20}


def test_a_process_is_killed_in_the_middle_of_a_write(hit, tmp_path):
    process, operations = hit(3, 0)
    assert process.returncode == -signal.SIGKILL
    assert operations[-1] == "3 write /file (hit)"
    assert sizes(tmp_path / "out") == {"file": 15}


def test_a_full_disk_stays_full(hit, tmp_path):
    process, operations = hit(3, 28)
    # Python writes no second time what was half written.
    assert operations[-2:] == ["3 write /file (hit)", "4 fsync /file (hit)"]
    assert "No space left on device" in process.stderr
    assert sizes(tmp_path / "out") == {"file": 15}


def test_an_error_happens_once(hit, tmp_path):
    process, _ = hit(4, 5)
    assert "Input/output error" in process.stderr
    assert sizes(tmp_path / "out") == {"file": 20}


def test_of_many_writes_to_a_file_three_are_tried():
    operations = ["1 open /a", *(f"{number} write /a" for number in range(2, 9)), "9 write /b", "10 rename /a"]
    assert places(operations) == [1, 2, 3, 8, 9, 10]


def test_words_of_a_command_stand_for_paths():
    words = {"RUN": "/a/RUN/OUT", "OUT": "/b"}
    assert fill("x --model RUN --RUN OUT/RUN", words) == ["x", "--model", "/a/RUN/OUT", "--RUN", "/b/RUN"]


@pytest.mark.gloo
@pytest.mark.parametrize("faults", some_of(["KILL ENOSPC", "EIO"], "KILL ENOSPC"))
def test_commands_that_are_hit_are_made_good(tmp_path, faults):
    shim = str(build_shim(tmp_path))  # otherwise hunt.py builds it, and starts a second time
    environment = os.environ | {"LD_PRELOAD": shim, "FAULTS_SHIM": shim}
    options = [word for fault in faults.split() for word in ("--fault", fault)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.hunt", "--every", "240", *options, *COMMANDS]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" hit, 0 not made good") == len(COMMANDS) * len(faults.split())
