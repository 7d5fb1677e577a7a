"""Test restarts by the launcher with ranks that do little: real processes that are killed.

tests/e2e/test_restarts.py has real runs.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swiftlite.launch.start import NODE_COUNTS
from swiftlite.runtime import progress
from tests.messages import has_line
from tests.tiers import some_of

pytestmark = pytest.mark.gloo

# Ranks that reduce a number in each of 10 steps, after which the first rank records its progress. `break_at` is called
# before each step.
RANKS = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from swiftlite.cli import main as cli
from swiftlite.base.errors import UserError
from swiftlite.runtime.progress import Progress, num_restarts, progress_file

rank, restarts = int(os.environ["RANK"]), num_restarts()

def break_at(step):
    {body}

def run(argv):
    dist.init_process_group("gloo")
    with Path("log").open("a") as log:
        log.write(f"{{restarts}} {{rank}} {{dist.get_world_size()}} {{os.environ['LAUNCHER']}}\\n")
    for step in range(1, 11):
        break_at(step)
        dist.all_reduce(torch.ones(4))
        if rank == 0:
            Progress(restarts, step, step, time.time()).write(progress_file())
    dist.destroy_process_group()
    return 0

cli._run = run
sys.exit(cli.main([]))
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
QUICK = "nodes.LAST_CALL_SECONDS, nodes.LOST_SECONDS, nodes.ENOUGH_SECONDS = 1, 3, 3"
"""Settings of the launchers of several nodes, whose defaults take half a minute."""


class Launchers:
    """Starts the launchers of a job of two ranks per node. All of them end with the test."""

    def __init__(self, directory: Path, body: str, most: int = 2):
        self.directory, self.most = directory, most
        (directory / "ranks.py").write_text(RANKS.format(body=body))
        self.started: list[subprocess.Popen] = []
        with socket.socket() as probe:
            probe.bind(("", 0))
            self.port = probe.getsockname()[1]

    def start(self, nnodes: str = "1", node: int = 0, counts: str = "1") -> subprocess.Popen:
        lines = (
            f"import sys\nfrom swiftlite.launch import elastic, nodes\n{QUICK}\nsys.exit(elastic.main(sys.argv[1:]))"
        )
        options = f"--nnodes={nnodes} --node-rank={node} --master-addr=127.0.0.1 --max-restarts={self.most}"
        port = 0 if nnodes == "1" else self.port
        words = [*options.split(), f"--master-port={port}", "--nproc-per-node=2", "ranks.py"]
        environment = {
            "OMP_NUM_THREADS": "1",
            "LAUNCHER": str(len(self.started)),
            NODE_COUNTS: counts,
            progress.FILE: str(self.directory / progress.NAME),
        }
        process = subprocess.Popen(
            [sys.executable, "-c", lines, *words],
            cwd=self.directory,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def end(self) -> list[str]:
        """Wait until all launchers have ended, and return what they printed."""
        return [process.communicate(timeout=90)[1] for process in self.started]

    def attempts(self) -> dict[int, list[tuple[int, int, int]]]:
        """Return (rank, number of ranks, launcher) of all ranks, by number of restarts."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for line in (self.directory / "log").read_text().splitlines():
            restarts, *place = map(int, line.split())
            found.setdefault(restarts, []).append((place[0], place[1], place[2]))
        return {restarts: sorted(places) for restarts, places in found.items()}

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not (self.directory / name).exists():
            assert time.monotonic() < deadline, f"{name} did not appear"
            time.sleep(0.02)


@pytest.fixture
def launchers(tmp_path) -> Iterator:
    made: list[Launchers] = []

    def make(body: str, most: int = 2) -> Launchers:
        made.append(Launchers(tmp_path, body, most))
        return made[-1]

    yield make
    for process in (process for each in made for process in each.started):
        process.kill()


def family_of(process: subprocess.Popen) -> list[psutil.Process]:
    launcher = psutil.Process(process.pid)
    return [launcher, *launcher.children(recursive=True)]


@pytest.mark.slow
def test_a_killed_rank_restarts_the_job(launchers):
    job = launchers(f"if restarts == 0 and rank == 1 and step == 5: {KILLED}")
    process = job.start()
    (errors,) = job.end()
    assert process.returncode == 0, errors
    assert job.attempts() == {0: [(0, 2, 0), (1, 2, 0)], 1: [(0, 2, 0), (1, 2, 0)]}
    assert has_line(errors, "swiftlite: 1 SIGKILL")
    assert has_line(errors, "swiftlite: restart 1 2 step 4")
    assert not (job.directory / progress.NAME).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "most", "restarts", "words"),
    [
        # a failure at another step each time
        pytest.param(f"if rank == 1 and step == 3 + restarts: {KILLED}", 2, 2, "--max_restarts 2", id="too many"),
        pytest.param(f"if rank == 1 and step == 5: {KILLED}", 5, 1, "twice step 4", id="the same step"),
        pytest.param(f"if rank == 1 and step == 1: {KILLED}", 5, 1, "twice", id="before the first step"),
    ],
)
def test_a_job_that_keeps_failing_is_given_up(launchers, body, most, restarts, words):
    job = launchers(body, most)
    process = job.start()
    (errors,) = job.end()
    assert process.returncode == 128 + signal.SIGKILL
    assert max(job.attempts()) == restarts
    assert has_line(errors, f"swiftlite: not restarted {words}")


USER_ERROR = ("if rank == 1 and step == 5: raise UserError('a bad row', 'correct it', 2)", 2)
FULL_DISK = ("if rank == 1 and step == 5: raise OSError(28, 'No space left on device')", 1)
STOPPED = ("if step == 5: time.sleep(1); sys.exit(128 + signal.SIGTERM)", 143)
"""Somebody sent a signal to the ranks, and they saved."""


@pytest.mark.parametrize(("body", "code"), some_of([USER_ERROR, FULL_DISK, STOPPED], USER_ERROR))
def test_an_error_that_would_repeat_is_not_restarted(launchers, body, code):
    job = launchers(body)
    process = job.start()
    (errors,) = job.end()
    assert (process.returncode, list(job.attempts())) == (code, [0]), errors


@pytest.mark.slow
def test_a_launcher_that_is_asked_to_stop_does_not_restart(launchers):
    job = launchers("Path(f'step-{step}').touch(); time.sleep(0.5)")
    process = job.start()
    job.wait_for("step-2")
    process.terminate()
    job.end()
    assert process.returncode == 128 + signal.SIGTERM
    assert list(job.attempts()) == [0]


@pytest.mark.slow
def test_a_rank_that_is_killed_restarts_both_nodes(launchers):
    job = launchers(f"if restarts == 0 and rank == 3 and step == 5: {KILLED}")
    nodes = [job.start("2", node, "2") for node in range(2)]
    errors = job.end()
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert [len(ranks) for ranks in job.attempts().values()] == [4, 4]
    assert all(has_line(each, "swiftlite: restart 1 2 step 4") for each in errors)


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_lost_node(launchers):
    job = launchers("Path(f'step-{step}').touch(); time.sleep(0.3)")
    first, lost = job.start("2:2", 0, "2"), job.start("2:2", 1, "2")
    job.wait_for("step-1")
    spare = job.start("2:2", 2, "2")
    job.wait_for("step-3")
    lost.kill()
    errors = job.end()
    assert [first.returncode, spare.returncode] == [0, 0], errors
    assert [launcher for *_, launcher in job.attempts()[1]] == [0, 0, 2, 2]


@pytest.mark.slow
def test_a_spare_that_is_not_needed_ends_with_the_job(launchers):
    job = launchers("time.sleep(0.1)")
    nodes = [job.start("1:1", node, "1") for node in range(2)]
    errors = job.end()
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert [launcher for *_, launcher in job.attempts()[0]] == [0, 0]


@pytest.mark.slow
def test_fewer_nodes_continue_without_a_spare(launchers):
    job = launchers("Path(f'step-{step}').touch(); time.sleep(0.3)")
    nodes = [job.start("1:3", node, "1,3") for node in range(3)]
    job.wait_for("step-3")
    nodes[2].kill()
    errors = job.end()
    assert [node.returncode for node in nodes[:2]] == [0, 0], errors
    assert [len(ranks) for ranks in job.attempts().values()] == [6, 2]  # 2 nodes are not allowed


@pytest.mark.slow
def test_a_node_that_no_longer_answers_is_lost(launchers):
    """Its connections stay open, as if it had lost its power."""
    job = launchers("Path(f'step-{step}').touch(); time.sleep(0.3)")
    first, lost, spare = (job.start("2:2", node, "2") for node in range(3))
    job.wait_for("step-3")
    stopped = next(node for node in (lost, spare) if len(family_of(node)) > 1)
    for process in family_of(stopped):
        process.suspend()
    errors = first.communicate(timeout=90)[1]
    assert first.returncode == 0, errors
    assert has_line(errors, f"swiftlite: node {socket.gethostname()} 3 s")
    assert {world_size for _, world_size, _ in job.attempts()[1]} == {4}
    for process in family_of(stopped):
        process.kill()


@pytest.mark.slow
def test_too_few_nodes_end_the_job(launchers):
    job = launchers("Path(f'step-{step}').touch(); time.sleep(0.3)")
    first, lost = job.start("2", 0, "2"), job.start("2", 1, "2")
    job.wait_for("step-3")
    lost.kill()
    errors = first.communicate(timeout=90)[1]
    assert first.returncode == 1
    assert has_line(errors, "swiftlite: NNODES=2 2")


@pytest.mark.slow
def test_the_loss_of_node_0_ends_the_job(launchers):
    job = launchers("Path(f'step-{step}').touch(); time.sleep(0.3)")
    lost, other = job.start("2", 0, "2"), job.start("2", 1, "2")
    job.wait_for("step-3")
    lost.kill()
    errors = other.communicate(timeout=90)[1]
    assert other.returncode == 1
    assert has_line(errors, "swiftlite: node 0 127.0.0.1")
    assert list(job.attempts()) == [0]
