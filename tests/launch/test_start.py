"""Test the processes and torchrun's command line that follow from the environment. test_elastic.py runs torchrun."""

import os
import socket
import sys

import pytest

from swiftlite.base.errors import OptionError, UserError
from swiftlite.launch.start import (
    Processes,
    check_restarts,
    read_environment,
    threads_per_process,
    torchrun_command,
)
from tests.messages import mention_each, mentions


def test_nothing_set_is_one_process():
    processes = read_environment({})
    assert processes == Processes()
    assert (processes.world_size, processes.must_start()) == (1, False)


def test_one_process_is_not_started_by_torchrun():
    assert not read_environment({"NPROC_PER_NODE": "1", "NNODES": "1", "MASTER_PORT": "29500"}).must_start()


def test_one_node():
    processes = read_environment({"NPROC_PER_NODE": "4"})
    assert (processes.world_size, processes.must_start()) == (4, True)
    assert torchrun_command(processes, ["megatron", "sft", "--lr", "1e-5"]) == [
        *(sys.executable, "-m", "swiftlite.launch.elastic", "--nproc-per-node=4", "--nnodes=1", "--node-rank=0"),
        *("--master-addr=127.0.0.1", "--master-port=0"),
        *("-m", "swiftlite", "megatron", "sft", "--lr", "1e-5"),
    ]


def test_one_node_with_a_port():
    command = torchrun_command(read_environment({"NPROC_PER_NODE": "2", "MASTER_PORT": "1234"}), [])
    assert command[4:8] == ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=1234"]


def test_two_nodes():
    env = {"NPROC_PER_NODE": "8", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-0"}
    processes = read_environment(env)
    assert processes.world_size == 16
    assert torchrun_command(processes, [])[3:8] == [
        "--nproc-per-node=8",
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=node-0",
        "--master-port=29500",
    ]


def test_a_range_of_nodes_with_spares():
    env = {"NPROC_PER_NODE": "8", "NNODES": "2:3", "NODE_RANK": "4", "MASTER_ADDR": "node-0"}
    processes = read_environment(env)
    assert (processes.min_nodes, processes.nnodes, processes.world_size, processes.node_rank) == (2, 3, 24, 4)
    command = torchrun_command(processes, [], max_restarts=5)
    assert command[4:6] == ["--nnodes=2:3", "--node-rank=4"]
    assert "--max-restarts=5" in command


def test_restarts_start_a_single_process_too():
    processes = read_environment({})
    assert processes.must_start(max_restarts=1)
    assert torchrun_command(processes, [], max_restarts=1)[4:8] == [
        "--nnodes=1",
        "--node-rank=0",
        "--master-addr=127.0.0.1",
        "--master-port=0",
    ]


@pytest.mark.parametrize(
    ("env", "max_restarts", "words"),
    [
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, 1, "--max_restarts 1"),
        ({"NNODES": "1:2", "NODE_RANK": "0", "MASTER_ADDR": "a"}, 0, "NNODES=1:2 --max_restarts"),
    ],
)
def test_restarts_that_the_environment_does_not_allow(env, max_restarts, words):
    with pytest.raises(UserError) as raised:
        check_restarts(read_environment(env), max_restarts, is_parallel=True)
    assert mentions(raised.value.problem, words)
    assert raised.value.hint
    assert raised.value.exit_code == 2


def test_inside_torchrun_nothing_is_started():
    env = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "NPROC_PER_NODE": "2", "NNODES": "2"}
    processes = read_environment(env)
    assert (processes.rank, processes.world_size, processes.must_start()) == (3, 4, False)


def test_a_cluster_s_own_rank_is_not_torchrun_s():
    # Kubernetes' PyTorchJob sets RANK and WORLD_SIZE to the node's, without LOCAL_RANK.
    assert read_environment({"RANK": "1", "WORLD_SIZE": "2", "NPROC_PER_NODE": "2"}).must_start()


@pytest.mark.parametrize(
    ("env", "problems"),
    [
        ({"NPROC_PER_NODE": "gpu"}, ["NPROC_PER_NODE gpu 1"]),
        ({"NPROC_PER_NODE": "0"}, ["NPROC_PER_NODE 0 1"]),
        ({"NNODES": "-1"}, ["NNODES -1 1"]),
        ({"NNODES": "3:2"}, ["NNODES 3:2"]),
        ({"NNODES": "0:2"}, ["NNODES 0:2"]),
        ({"NNODES": "2:"}, ["NNODES 2:"]),
        ({"NNODES": "1:2"}, ["NNODES=1:2 MASTER_ADDR", "NNODES=1:2 NODE_RANK"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT=70000 65535"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT http 1"]),
        ({"NODE_RANK": "1"}, ["NODE_RANK=1 NNODES=1"]),
        (
            {"NNODES": "2"},
            ["NNODES=2 MASTER_ADDR", "NNODES=2 NODE_RANK"],
        ),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, ["NODE_RANK=2 NNODES=2"]),
        (
            {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "x", "NPROC_PER_NODE": "y"},
            [
                "NPROC_PER_NODE y 1",
                "NODE_RANK x 0",
            ],
        ),
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, ["RANK x 0"]),
    ],
)
def test_an_environment_that_cannot_be(env, problems):
    with pytest.raises(OptionError) as raised:
        read_environment(env)
    assert mention_each([problem for problem, _ in raised.value.problems], problems)
    assert all(hint for _, hint in raised.value.problems)
    assert raised.value.exit_code == 2


def test_processes_share_the_cores_that_this_one_may_use():
    allowed = os.sched_getaffinity(0)
    assert threads_per_process(1) == len(allowed)
    assert threads_per_process(1000) == 1
    os.sched_setaffinity(0, {min(allowed)})  # as SLURM does for a job with a part of a node
    try:
        assert threads_per_process(1) == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_taken_port_is_named_and_another_proposed(swiftlite, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        argv = "export --to_mcore --model model --output_dir out --tensor_model_parallel_size 2".split()
        result = swiftlite(*argv, NPROC_PER_NODE="2", MASTER_PORT=str(port))
    assert result.returncode == 2
    assert mentions(result.stderr.splitlines()[0], f"swiftlite: MASTER_PORT={port}")
    proposed = int(result.stderr.split("export MASTER_PORT=")[1])
    with socket.socket() as server:
        server.bind(("", proposed))
