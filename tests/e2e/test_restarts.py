"""Test runs with --max_restarts whose processes are killed: their results are those of a run that was not interrupted.

test_launched.py has a run that CI kills, and tests/launch/test_restarts.py the launcher's decisions.
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Commands, read_metrics
from tests.faults.hunt import digest_of_checkpoint
from tests.faults.unattended import INJECTED
from tests.messages import has_line

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

LAST = 40
"""Last step: late enough that a process is killed before it, also on a busy machine."""
OPTIONS = {
    "plain": (),
    "no checkpoint yet": ("--save_steps", 100),
    "store": ("--checkpoint_store", "STORE", "--save_total_limit", 2, "--ephemeral_save_steps", 1),
    "streaming": ("--packing", "--max_length", 64, "--packing_length", 96, "--streaming", "--streaming_buffer_size", 8),
    "optimizer": ("--use_distributed_optimizer", "true"),
}


@pytest.fixture
def long_sft(sft) -> list[str]:
    return [*sft, "--train_iters", str(LAST), "--save_steps", "4"]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen]]:
    """Hold the launchers of a test, and end them with it."""
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        process.kill()


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 200
    path = run / "metrics.jsonl"
    while not path.exists() or f'"step": {step},' not in path.read_text():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.005)


def ranks_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    """Return the ranks of a launcher in order."""
    return sorted(psutil.Process(launcher.pid).children(), key=lambda process: process.pid)


def results_of(run: Path, last: int = LAST) -> dict[str, Any]:
    """Return everything that a failure must not change."""
    metrics = [line for line in read_metrics(run) if "restart/number" not in line]
    acceptance = run / "acceptance.json"
    return {
        "weights": digest_of_checkpoint(run / f"checkpoint-{last}"),
        "metrics": metrics,
        "acceptance": json.loads(acceptance.read_text()) if acceptance.exists() else None,  # not of streamed rows
    }


def restarts_of(run: Path) -> list[dict]:
    """Return the lines about failures in metrics.jsonl, and check that the report and its page have them too."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    restarts = [line for line in lines if "restart/number" in line]
    assert json.loads((run / "run_report.json").read_text())["restarts"] == restarts
    page = (run / "run_report.html").read_text()
    assert all(f"{line['restart/lost_seconds']:.4g}" in page for line in restarts)
    return restarts


def unbroken(commands: Commands, words: Sequence[object], run: Path, processes: int) -> dict[str, Any]:
    commands.ok(*words, "--output_dir", run, processes=processes)
    return results_of(run)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_killed_rank_changes_nothing(commands, long_sft, started, tmp_path, kind):
    def words(store: str) -> list[object]:
        return [*long_sft, *(tmp_path / store if word == "STORE" else word for word in OPTIONS[kind])]

    run = tmp_path / "run"
    process = commands.start_for_real(*words("store"), "--output_dir", run, "--max_restarts", 1, NPROC_PER_NODE="2")
    started.append(process)
    wait_for_step(run, 10, process)
    ranks_of(process)[1].kill()
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert has_line(errors, "swiftlite: rank 1 SIGKILL")
    assert results_of(run) == unbroken(commands, words("another"), tmp_path / "whole", processes=2)
    (restart,) = restarts_of(run)
    assert restart["step"] >= 10
    assert restart["restart/lost_seconds"] > 0
    first = 0 if kind == "no checkpoint yet" else restart["step"] - 8  # copied saves can be later
    assert 0 <= restart["restart/repeated_steps"] <= restart["step"] - first
    assert not (run / ".progress.json").exists()


@pytest.fixture
def start_node(commands, long_sft, started, tmp_path):
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]

    def start(nnodes: str, node: int, *options: object, **environment: str) -> subprocess.Popen:
        words = [*long_sft, "--global_batch_size", 8, "--output_dir", tmp_path / "run", "--max_restarts", 2]
        environment |= {"NNODES": nnodes, "NODE_RANK": str(node), "NPROC_PER_NODE": "2"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started.append(commands.start_for_real(*words, *options, **environment, **address))
        return started[-1]

    return start


def test_a_killed_rank_and_a_killed_node_with_a_spare_change_nothing(commands, long_sft, start_node, tmp_path):
    run = tmp_path / "run"
    nodes = [start_node("2:2", 0), start_node("2:2", 1)]
    wait_for_step(run, 6, nodes[0])
    ranks_of(nodes[1])[0].kill()  # rank 2
    wait_for_step(run, 14, nodes[0])
    spare = start_node("2:2", 2)
    wait_for_step(run, 18, nodes[0])
    nodes[1].kill()  # its ranks end with it
    errors = [node.communicate(timeout=300)[1] for node in (nodes[0], spare)]
    assert [nodes[0].returncode, spare.returncode] == [0, 0], errors
    whole = unbroken(commands, [*long_sft, "--global_batch_size", 8], tmp_path / "whole", processes=4)
    assert results_of(run) == whole
    assert [line["restart/number"] for line in restarts_of(run)] == [1, 2]


def test_a_node_that_must_tokenize_is_waited_for(commands, long_sft, start_node, tmp_path):
    """Node 0 has the tokenized rows; node 1 needs longer for them than a step may take."""
    cache = ("--dataset_cache", tmp_path / "cache-0")
    whole = unbroken(commands, [*long_sft, "--global_batch_size", 8, *cache], tmp_path / "whole", processes=4)
    (tmp_path / "injected").mkdir()
    (tmp_path / "injected" / "sitecustomize.py").write_text(INJECTED)
    paths = os.pathsep.join([str(tmp_path / "injected"), os.environ.get("PYTHONPATH", "")])
    limit = ("--distributed_timeout_minutes", 1)
    nodes = [
        start_node("2:2", 0, *limit, *cache),
        start_node(
            "2:2", 1, *limit, "--dataset_cache", tmp_path / "cache-1", UNATTENDED_FAULT="slow", PYTHONPATH=paths
        ),
    ]
    errors = [node.communicate(timeout=400)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert has_line(errors[0], "waiting for rank 2")
    assert results_of(tmp_path / "run") == whole
    assert all("restart/number" not in line for line in read_metrics(tmp_path / "run"))


def test_fewer_nodes_continue_with_the_same_batches(commands, long_sft, start_node, tmp_path):
    run = tmp_path / "run"
    nodes = [start_node("1:2", 0), start_node("1:2", 1)]
    wait_for_step(run, 10, nodes[0])
    nodes[1].kill()
    errors = nodes[0].communicate(timeout=300)[1]
    assert nodes[0].returncode == 0, errors
    whole = unbroken(commands, [*long_sft, "--global_batch_size", 8], tmp_path / "whole", processes=4)
    found, expected = results_of(run)["metrics"], whole["metrics"]
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (found, expected)]
    assert losses[0][:8] == losses[1][:8]  # before the checkpoint
    assert losses[0][:24] == pytest.approx(losses[1][:24], rel=1e-4)  # float32 sums in another order, over 16 steps
    assert len(losses[0]) == len(losses[1]) == LAST
    assert len(restarts_of(run)) == 1


def test_a_number_of_nodes_that_cannot_have_the_batch_is_refused(start_node):
    process = start_node("1:2", 0, "--context_parallel_size", 4)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert has_line(errors, "NNODES=1:2 1")
