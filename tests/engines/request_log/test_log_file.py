"""Test the file that conversations are logged to."""

import os
import stat
import subprocess
import sys

import pytest

from swiftlite.base.errors import UserError
from swiftlite.engines.request_log.log_file import LogFile
from tests.messages import naming


def test_a_full_file_is_renamed(tmp_path):
    file = LogFile(tmp_path / "log.jsonl", 10)
    for line in (b"1234\n", b"5678\n", b"abcd\n", b"longer than ten\n", b"last\n"):
        file.append(line)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "log.jsonl": b"last\n",
        "log.1.jsonl": b"longer than ten\n",
    }


def test_only_the_user_can_read_it(tmp_path):
    file = LogFile(tmp_path / "log.jsonl", 5)
    file.check("--log_requests")
    for line in (b"1234\n", b"5678\n"):
        file.append(line)
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o600, 0o600]


def test_an_existing_file_is_continued(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b"old\n")
    file = LogFile(tmp_path / "log.jsonl", 100)
    file.check("--log_requests")
    file.append(b"new\n")
    assert (tmp_path / "log.jsonl").read_bytes() == b"old\nnew\n"


def test_a_last_line_without_its_end_is_ended(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"edited by hand")
    path.chmod(0o644)
    file = LogFile(path, 100)
    file.check("--log_requests")
    for line in (b"new\n", b"newer\n"):
        file.append(line)
    assert path.read_bytes() == b"edited by hand\nnew\nnewer\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_stays_when_its_file_is_renamed(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "log.jsonl"
    link.symlink_to(tmp_path / "disk" / "log.jsonl")
    file = LogFile(link, 5)
    for line in (b"1234\n", b"5678\n"):
        file.append(line)
    assert link.is_symlink()
    assert link.read_bytes() == b"5678\n"
    assert (tmp_path / "disk" / "log.1.jsonl").read_bytes() == b"1234\n"


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(UserError, match=naming(f"--log_requests {tmp_path / 'log.jsonl'}")):
        LogFile(tmp_path / "log.jsonl", 5).check("--log_requests")


def test_processes_lose_no_line(tmp_path):
    """Check that both files together have the newest lines, each once and complete, after several rotations."""
    code = """
import sys
from pathlib import Path
from swiftlite.engines.request_log.log_file import LogFile
file = LogFile(Path(sys.argv[1]), 4000)
for number in range(100):
    file.append(f"{sys.argv[2]} {number:03} {'.' * 20}\\n".encode())
"""
    words = [sys.executable, "-c", code, str(tmp_path / "log.jsonl")]
    processes = [subprocess.Popen([*words, name]) for name in "ab"]
    assert [process.wait(60) for process in processes] == [0, 0]
    lines = []
    for name in ("log.1.jsonl", "log.jsonl"):
        content = (tmp_path / name).read_text()
        assert len(content) <= 4000
        lines += content.splitlines()
    assert len(set(lines)) == len(lines)
    assert {len(line) for line in lines} == {len("a 000 ") + 20}
    for name in "ab":
        numbers = [int(line[2:5]) for line in lines if line[0] == name]
        assert numbers == list(range(100 - len(numbers), 100))
    assert len(lines) >= 4000 // 27


@pytest.mark.parametrize("path", ["", "no/log.jsonl"])
def test_an_unwritable_file_is_named(tmp_path, path):
    with pytest.raises(UserError, match=naming(f"--log_requests {tmp_path / path}")):
        LogFile(tmp_path / path, 10).check("--log_requests")
