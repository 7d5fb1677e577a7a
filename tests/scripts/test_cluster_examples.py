"""Test that files for clusters set the variables that `launch/start.py` reads, and that their commands are valid."""

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from swiftlite.args.commands import DeployArgs, GrpoArgs
from swiftlite.base.errors import OptionError
from swiftlite.cli.parse import parse
from swiftlite.cli.table import find
from swiftlite.launch import start
from swiftlite.plan.facts import Facts
from swiftlite.plan.layout import data_parallel_size, layout_of
from swiftlite.rules import common, deploy
from swiftlite.rules.training import grpo
from tests.messages import mentions

EXAMPLES = Path(__file__).parents[2] / "examples"
SLURM, KUBERNETES = EXAMPLES / "slurm.sbatch", EXAMPLES / "kubernetes.yaml"
GRPO_SLURM, GRPO_KUBERNETES = EXAMPLES / "grpo.sbatch", EXAMPLES / "grpo-kubernetes.yaml"


def check_training(argv: list[str], processes: start.Processes, words: str = "megatron sft") -> Any:
    """Check that options exist and have valid values for the number of processes; return them."""
    command, rest = find(argv)
    args, notes = parse(command.args_class, rest)
    assert command.words == words
    assert notes == []
    facts = Facts(processes.world_size, {})
    assert list(common.numbers_are_in_range(args, facts)) == []
    replicas = data_parallel_size(layout_of(args), processes.world_size)
    assert args.global_batch_size % (args.micro_batch_size * replicas) == 0
    return args


def check_servers(argv: list[str], training: GrpoArgs) -> DeployArgs:
    """Check that a server fits the training; return its options."""
    command, rest = find(argv)
    args, _ = parse(command.args_class, rest)
    assert isinstance(args, DeployArgs)
    for rule in (deploy.live_weights_have_an_engine, deploy.live_weights_reach_whole_layers):
        assert list(rule(args, Facts(1, {}))) == []
    assert args.live_weights
    assert args.weight_transport == "nccl"  # between machines
    assert args.max_model_len == training.max_length
    assert args.model == training.model
    assert list(grpo.servers_have_addresses(training)) == []
    assert all(url.endswith(f":{args.port}") for url in training.rollout_server)
    return args


@pytest.fixture
def node(tmp_path):
    """Return node(JOB_ID, NODE, **env): the environment and the words with which slurm.sbatch starts swiftlite on a
    node.
    """

    def fake(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    fake("scontrol", 'printf "gpu17\\ngpu18\\n"')
    fake("srun", 'shift 2; exec "$@"')  # its options; then the command of one node
    fake("swiftlite", 'env -0 > environment; printf "%s\\0" "$@" > words')

    def run(job_id: int, number: int, **more: str) -> tuple[dict[str, str], list[str]]:
        env = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "MODEL": "model dir",
            "TRAIN": "train.jsonl",
            "OUT": "out",
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_CPUS_PER_TASK": "64",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "gpu[17-18]",
            "SLURM_JOB_ID": str(job_id),
            "SLURM_NODEID": str(number),
            **more,
        }
        subprocess.run(["bash", SLURM, "--lr", "1e-4"], cwd=tmp_path, env=env, check=True)
        environment = (tmp_path / "environment").read_text().rstrip("\0").split("\0")
        words = (tmp_path / "words").read_text().rstrip("\0").split("\0")
        return dict(line.split("=", 1) for line in environment), words

    return run


@pytest.mark.parametrize("number", [0, 1])
def test_slurm_starts_every_node(node, number):
    env, words = node(4711, number)
    processes = start.read_environment(env)
    assert processes == start.Processes(8, 2, number, "gpu17", 24711)
    assert words[words.index("--model") + 1] == "model dir"
    assert words[-4:] == ["--resume", "true", "--lr", "1e-4"]  # a job that is requeued goes on
    assert env["SRUN_CPUS_PER_TASK"] == "64"
    check_training(words, processes)


def test_slurm_without_gpus(node):
    env, _ = node(4711, 0, NPROC_PER_NODE="2", SLURM_GPUS_ON_NODE="")
    assert start.read_environment(env).nproc_per_node == 2


def test_slurm_says_what_is_missing():
    done = subprocess.run(
        ["bash", SLURM], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert mentions(done.stderr, "MODEL")


def test_kubernetes_starts_every_node():
    service, job = yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8"))
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(env["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(env["NPROC_PER_NODE"])
    # Pod 0 of an indexed Job is JOB-0, found under the headless Service that is its subdomain.
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert container["ports"][0]["containerPort"] == int(env["MASTER_PORT"])
    assert env["NODE_RANK"] == ""  # Kubernetes fills it in
    for number in range(spec["completions"]):
        processes = start.read_environment(env | {"NODE_RANK": str(number)})
        assert processes == start.Processes(8, 2, number, env["MASTER_ADDR"], 29500)
    assert container["command"][0] == "swiftlite"
    check_training(container["command"][1:], processes)
    assert "--resume=true" in container["command"]  # a pod that is started again goes on


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return the environment of grpo.sbatch on 4 nodes, in which each srun writes its options, words and environment to
    a directory with the number of its first node."""

    def fake(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    fake("scontrol", 'printf "gpu%s\\n" 1 2 3 4')
    fake("curl", 'until [ -s step2/words ]; do sleep 0.05; done; echo "${@: -1}" >> waited')  # the servers have started
    fake("swiftlite", 'env -0 > environment; printf "%s\\0" "$@" > words; exit ${FAKE_CODE:-0}')
    fake(
        "srun",
        """first=0
while [[ $1 == --* ]]; do case $1 in --relative=*) first=${1#*=};; esac; shift; done
mkdir -p step$first; cd step$first
if [ $first != 0 ]; then set -- timeout 20 "$@"; fi  # servers run until they are stopped
SLURM_NODEID=0 exec "$@\"""",
    )
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MODEL": "model dir",
        "TRAIN": "train.jsonl",
        "OUT": "out",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_NODELIST": "gpu[1-4]",
        "SLURM_JOB_ID": "4711",
    }


def read_step(directory: Path) -> tuple[dict[str, str], list[str]]:
    environment = (directory / "environment").read_text().rstrip("\0").split("\0")
    return dict(line.split("=", 1) for line in environment), (directory / "words").read_text().rstrip("\0").split("\0")


@pytest.mark.parametrize("code", [0, 3])
def test_slurm_starts_servers_and_training(cluster, tmp_path, code):
    done = subprocess.run(
        ["bash", GRPO_SLURM, "--lr", "1e-5"], cwd=tmp_path, env=cluster | {"FAKE_CODE": str(code)}, check=False
    )
    assert done.returncode == code
    env, words = read_step(tmp_path / "step0")
    processes = start.read_environment(env)
    assert processes == start.Processes(8, 2, 0, "gpu1", 24711)
    training = check_training(words, processes, "megatron grpo")
    assert training.resume
    assert training.lr == 1e-5
    assert training.rollout_server == ["http://gpu3:34711", "http://gpu4:34711"]
    assert (tmp_path / "waited").read_text().split() == [f"{url}/health" for url in training.rollout_server]
    serving, words = read_step(tmp_path / "step2")
    assert serving["VLLM_API_KEY"] == env["VLLM_API_KEY"] != ""
    args = check_servers(words, training)
    assert args.host == "0.0.0.0"
    assert args.vllm_engine_kwargs == {"tensor_parallel_size": 8}


def test_kubernetes_starts_servers_and_training():
    parts = {(part["kind"], part["metadata"]["name"]): part for part in yaml.safe_load_all(GRPO_KUBERNETES.read_text())}
    servers = parts["StatefulSet", "swiftlite-rollout"]
    job = parts["Job", "swiftlite-grpo"]["spec"]
    (trainer,), (server,) = (part["template"]["spec"]["containers"] for part in (job, servers["spec"]))
    env = {entry["name"]: entry.get("value", "") for entry in trainer["env"]}
    processes = start.read_environment(env | {"NODE_RANK": "1"})
    assert processes == start.Processes(8, 2, 1, "swiftlite-grpo-0.swiftlite-grpo", 29500)
    training = check_training(trainer["command"][1:], processes, "megatron grpo")
    check_servers(server["command"][1:], training)
    service = parts["Service", servers["spec"]["serviceName"]]
    assert service["spec"]["selector"] == servers["spec"]["template"]["metadata"]["labels"]
    names = [f"swiftlite-rollout-{number}.swiftlite-rollout" for number in range(servers["spec"]["replicas"])]
    assert training.rollout_server == [f"http://{name}:8000" for name in names]
    keys = [
        entry["valueFrom"] for part in (trainer, server) for entry in part["env"] if entry["name"] == "VLLM_API_KEY"
    ]
    assert len(keys) == 2
    assert keys[0] == keys[1]


@pytest.mark.parametrize("path", [KUBERNETES, GRPO_KUBERNETES], ids=lambda path: path.name)
def test_kubernetes_knows_the_exit_codes(path):
    *_, job = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    actions = {}
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        for code in rule.get("onExitCodes", {"values": []})["values"]:
            actions[code] = rule["action"]
    assert actions == {OptionError([("", "")]).exit_code: "FailJob", 128 + signal.SIGTERM: "Ignore"}


@pytest.mark.parametrize("path", [SLURM, KUBERNETES, GRPO_SLURM, GRPO_KUBERNETES], ids=lambda path: path.name)
def test_the_header_says_what_it_takes(path):
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert re.findall(r"^# (\w+): ", header, re.MULTILINE) == ["Hardware", "Time", "Expect", "Before", "Run"]
