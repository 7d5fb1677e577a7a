"""Test two ranks that swiftlite starts: one is killed, later the process group receives a signal, and the run resumes.

There is only one start, because it takes a minute. The current directory contains Python files that must not be
executed, and the host name is a network address on which no process may listen. tests/launch has the launcher's
decisions.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Commands, read_metrics, sft_options, write_rows
from tests.e2e.test_current_directory import SCRIPT, executed_in, write_hostile_model
from tests.e2e.test_restarts import ranks_of, restarts_of, results_of, wait_for_step
from tests.e2e.test_sft import wait_for_a_save
from tests.messages import has_line

pytestmark = pytest.mark.gloo

LAST = 60
"""Last step: late enough that both signals arrive before it, also on a busy machine."""


@dataclass(frozen=True)
class Launched:
    """What a launcher and its ranks did.

    Attributes:
        run: directory of the run, after it was resumed.
        whole: directory of the same run without interruptions.
        code: exit code of the launcher.
        errors: stderr of the launcher and its ranks.
        stopped_at: last step before the signal.
        files: what the run's directory contained after the signal.
        listening: addresses on which the processes listened.
        executed: names of the executed files of the current directory.
    """

    run: Path
    whole: Path
    code: int
    errors: str
    stopped_at: int
    files: list[str]
    listening: list[str]
    executed: str


def on_the_network() -> list[str]:
    """Return words that run a command on a machine whose name is its network address; empty if this is not possible.

    Only root can set this up.
    """
    addresses = [address.address for interface in psutil.net_if_addrs().values() for address in interface]
    outside = [address for address in addresses if re.fullmatch(r"[\d.]+", address) and address != "127.0.0.1"]
    if not outside:
        return []
    words = ["unshare", "--uts", "sh", "-c", f'hostname {outside[0]} && exec "$@"', "sh"]
    return words if subprocess.run([*words, "true"], capture_output=True).returncode == 0 else []


def addresses_of(launcher: subprocess.Popen) -> list[str]:
    """Return the addresses on which a launcher and its ranks listen."""
    first = psutil.Process(launcher.pid)
    sockets = [each for member in (first, *first.children(recursive=True)) for each in member.net_connections()]
    return [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Launched:
    directory = tmp_path_factory.mktemp("launched")
    model = write_hostile_model(directory / "files")
    run, whole = directory / "run", directory / "whole"
    words = [*sft_options(model, write_rows(directory / "rows.jsonl")), "--train_iters", LAST, "--async_save", "true"]
    start = [*on_the_network(), sys.executable, "-W", "ignore", "-c", SCRIPT]
    process = subprocess.Popen(
        [*start, *map(str, words), "--output_dir", run, "--max_restarts", "1"],
        cwd=model,
        env=os.environ | {"NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_step(run, 10, process)
        ranks_of(process)[1].kill()
        wait_for_step(run, 24, process)  # behind those that a save of the killed ranks could be for
        listening = addresses_of(process)
        wait_for_a_save(process, run)
        os.killpg(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    stopped_at = read_metrics(run)[-1]["step"]
    files = [path.name for path in run.iterdir()]
    commands = Commands(directory)
    commands.ok(*words, "--output_dir", run, "--resume", processes=2, pages=True)
    commands.ok(*words, "--output_dir", whole, processes=2)
    return Launched(
        run, whole, process.returncode, errors, stopped_at, files, sorted(set(listening)), executed_in(model)
    )


def test_a_killed_rank_and_a_signal_change_nothing(launched):
    assert has_line(launched.errors, "swiftlite: rank 1 SIGKILL")
    assert results_of(launched.run, LAST) == results_of(launched.whole, LAST)
    (restart,) = restarts_of(launched.run)
    assert restart["step"] >= 10
    assert restart["restart/lost_seconds"] > 0
    assert 0 <= restart["restart/repeated_steps"] <= 8  # an asynchronous save can be one save late


def test_a_signal_to_the_whole_group_does_not_end_a_save(launched):
    """torchrun, a terminal and batch systems send signals to the whole process group."""
    assert launched.code == 128 + signal.SIGTERM
    assert "--resume" in launched.errors
    assert "Traceback" not in launched.errors
    saved = [int(name.removeprefix("checkpoint-")) for name in launched.files if name.startswith("checkpoint-")]
    assert max(saved) == launched.stopped_at < LAST
    assert not [name for name in launched.files if name.startswith(".checkpoint-")]


def test_ranks_execute_nothing_in_the_current_directory(launched):
    assert launched.executed == ""


def test_ranks_on_one_machine_listen_to_it_alone(launched):
    """This also holds if the host name is a network address, as usual."""
    assert launched.listening == ["127.0.0.1"]
