"""torchrun as `launch.py` starts it: real processes, their exit codes, signals and messages."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

PRELUDE = "import os, signal, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n"


def start(tmp_path, body: str) -> subprocess.Popen:
    """Two ranks that run `body`."""
    (tmp_path / "ranks.py").write_text(PRELUDE + body)
    return subprocess.Popen(
        [sys.executable, "-m", "swiftlite.cli.elastic", "--nproc-per-node=2", "--standalone", "ranks.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"{files} did not appear"
        time.sleep(0.05)


def test_ranks_that_end_well(tmp_path):
    process = start(tmp_path, "Path(f'rank-{rank}').touch()\n")
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1", "ranks.py"]  # no logs are left


def test_the_exit_code_of_the_rank_that_failed(tmp_path):
    process = start(tmp_path, "print('what went wrong', file=sys.stderr) if rank else time.sleep(60)\nsys.exit(7)\n")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 7
    assert stderr.splitlines() == [
        "what went wrong",
        "swiftlite: rank 1 ended first, with exit code 7; the others were stopped",
    ]


def test_a_rank_that_is_killed(tmp_path):
    process = start(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(60)\n")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert stderr == "swiftlite: rank 0 ended first, with signal SIGKILL; the others were stopped\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_rank_and_is_waited_for(tmp_path, number):
    body = f"""
def save(*_):
    time.sleep(2)  # a checkpoint takes its time
    Path(f"saved-{{rank}}").touch()
    sys.exit(0)

signal.signal({int(number)}, save)
Path(f"ready-{{rank}}").touch()
time.sleep(60)
"""
    process = start(tmp_path, body)
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()
    assert stderr == ""


def test_a_second_signal_reaches_the_ranks_too(tmp_path):
    body = """
received = []

def stop(number, frame):
    received.append(number)
    Path(f"received-{len(received)}-{rank}").touch()
    if len(received) == 2:
        os._exit(0)

signal.signal(signal.SIGTERM, stop)
Path(f"ready-{rank}").touch()
while True:
    time.sleep(1)
"""
    process = start(tmp_path, body)
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "received-1-0", tmp_path / "received-1-1")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "received-2-0").exists()
    assert (tmp_path / "received-2-1").exists()
