"""Test that only one run uses a directory: with several processes, and after a process was killed."""

import os
import signal
import subprocess
import sys

import pytest

from swiftlite.base.errors import UserError
from swiftlite.runtime.lock import holder_of, only_run_in
from tests.messages import naming

HOLDER = """
import sys, time
from pathlib import Path
from swiftlite.runtime.lock import only_run_in

with only_run_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_is_named_until_it_is_killed(tmp_path):
    run = tmp_path / "a" / "run"
    with subprocess.Popen([sys.executable, "-c", HOLDER, run], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        who = f"{other.pid} on {os.uname().nodename}"
        assert holder_of(run) == who
        with (
            pytest.raises(UserError, match=naming(f"--output_dir {run} {other.pid} {os.uname().nodename}")),
            only_run_in(run),
        ):
            pass
        other.send_signal(signal.SIGKILL)
    assert holder_of(run) == ""
    with only_run_in(run):
        assert holder_of(run).startswith(f"{os.getpid()} ")
    assert not run.exists()  # nothing was written into it


def test_what_a_run_has_written_stays(tmp_path):
    with only_run_in(tmp_path):
        (tmp_path / "args.json").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["args.json"]
    assert holder_of(tmp_path / "nowhere") == ""


def test_a_place_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=naming(f"--output_dir {tmp_path / 'file/run'}")),
        only_run_in(tmp_path / "file/run"),
    ):
        pass
