"""Whole commands in processes of their own, on a tiny model and a few rows."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e import vllm_here
from tests.tiny import make_tiny_hf


class Commands:
    """Runs `swiftlite ...` as a user would; every call is a process."""

    def __init__(self, directory: Path):
        self.directory = directory

    def start(self, *argv: object, processes: int = 1, **environment: str) -> subprocess.Popen:
        launch = {"NPROC_PER_NODE": str(processes)} if processes > 1 else {}
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "swiftlite", *map(str, argv)],
            cwd=self.directory,
            env={**os.environ, "OMP_NUM_THREADS": "1", **launch, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that `kill` reaches the processes that a checkpoint is written with
        )

    @staticmethod
    def kill(process: subprocess.Popen) -> None:
        """kill -9, as the kernel's out-of-memory killer or a batch system does."""
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def run(self, *argv: object, **options) -> subprocess.CompletedProcess:
        process = self.start(*argv, **options)
        out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def ok(self, *argv: object, **options) -> subprocess.CompletedProcess:
        result = self.run(*argv, **options)
        assert result.returncode == 0, result.stderr
        return result


@pytest.fixture
def commands(tmp_path) -> Commands:
    return Commands(tmp_path)


@pytest.fixture(scope="session")
def vllm() -> Iterator[Callable[..., vllm_here.Served]]:
    """`vllm_here.serve`, in its own process."""
    with vllm_here.start_process() as process:
        yield lambda *args, **options: process.submit(vllm_here.serve, *args, **options).result(timeout=300)


@pytest.fixture
def model(tmp_path) -> Path:
    return make_tiny_hf(tmp_path / "model", "qwen3", depth=1, with_tokenizer=True)


@pytest.fixture
def dataset(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"query": f"What is {i} plus {i}?", "response": f"It is {2 * i}."} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def sft(model, dataset) -> list[str]:
    """The options that every run of these tests shares."""
    return (
        f"megatron sft --model {model} --dataset {dataset} --torch_dtype float32 --micro_batch_size 2 "
        "--global_batch_size 4 --train_iters 12 --save_steps 4 --eval_steps 100 --eval_iters 1 --lr 1e-3 "
        "--acceptance_samples 2 --acceptance_max_new_tokens 4 --tensorboard false"
    ).split()


def read_metrics(run: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith("per_second")} for line in lines]
