"""Fixtures that run whole commands in separate processes, with a tiny model and a few rows."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e import vllm_here
from tests.forked import Host, Running, SignalAtCall, run_swiftlite, start_swiftlite
from tests.parallel.launch import open_store, rank_environments
from tests.tiny import make_tiny_hf
from tests.untimed import untimed


class Commands:
    """Runs `swiftlite ...` in a directory as a user would. Every call starts one or several processes.

    Args:
        host: process that the commands are forked from; default: the process that all tests share.
    """

    def __init__(self, directory: Path, host: Host | None = None):
        self.directory = directory
        self._host = host
        self._stores = []  # where ranks meet, as long as this lives
        self._numbers = itertools.count()

    def start(
        self, *argv: object, processes: int = 1, signal_at: SignalAtCall | None = None, pages: bool = False
    ) -> Running:
        """Start one process, or several ranks with the environment that torchrun would set.

        Args:
            signal_at: where each process sends itself a signal.
            pages: whether runs write run_report.html.
        """
        environments = [self._environment()]
        if processes > 1:
            self._stores.append(open_store())
            ranks = rank_environments(processes, self._stores[-1].port)
            environments = [self._environment() | rank for rank in ranks]
        return start_swiftlite(list(map(str, argv)), self.directory, environments, *self._outputs(), signal_at, pages)

    @staticmethod
    def kill(process: Running) -> None:
        """Kill a process with kill -9, as the kernel does when memory is exhausted, or a batch system."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)

    def run(self, *argv: object, processes: int = 1, pages: bool = False) -> subprocess.CompletedProcess:
        words = list(map(str, argv))
        if self._host:
            out, err = self._outputs()
            code = self._host.call(run_swiftlite, words, self.directory, out, err)
            return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())
        process = self.start(*words, processes=processes, pages=pages)
        out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(words, process.wait(0), out, err)

    def ok(self, *argv: object, **options) -> subprocess.CompletedProcess:
        result = self.run(*argv, **options)
        assert result.returncode == 0, result.stderr
        return result

    def start_for_real(self, *argv: object, **environment: str) -> subprocess.Popen:
        """Start `python -m swiftlite ...` in a separate process group, and return the running process.

        torchrun is started too if `environment` requires it.
        """
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "swiftlite", *map(str, argv)],
            cwd=self.directory,
            env=self._environment() | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1"}

    def _outputs(self) -> tuple[Path, Path]:
        """Return files for stdout and stderr.

        Both files are outside of the working directory, because tests check its content.
        """
        number = next(self._numbers)
        logs = self.directory.with_name(f"{self.directory.name}.logs")
        logs.mkdir(exist_ok=True)
        return logs / f"{number}.out", logs / f"{number}.err"


@pytest.fixture
def commands(tmp_path) -> Commands:
    return Commands(tmp_path)


@pytest.fixture(scope="session")
def vllm_host() -> Iterator[Host]:
    """Yield the process from which tests that use vLLM in one process are forked."""
    host = vllm_here.start_host()
    yield host
    host.close()


@pytest.fixture(scope="session")
def vllm(vllm_host):
    """Return `vllm_here.serve`, which runs in a separate process."""
    return lambda *args, **options: vllm_host.call(partial(vllm_here.serve, *args, **options))


@pytest.fixture
def model(tmp_path) -> Path:
    return make_tiny_hf(tmp_path / "model", "qwen3", depth=1, with_tokenizer=True)


def write_rows(path: Path) -> Path:
    rows = [{"query": f"What is {i} plus {i}?", "response": f"It is {2 * i}."} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sft_options(model: Path, dataset: Path) -> list[str]:
    """Return the options that all runs of these tests share."""
    return (
        f"megatron sft --model {model} --dataset {dataset} --torch_dtype float32 --micro_batch_size 2 "
        "--global_batch_size 4 --train_iters 12 --save_steps 4 --eval_steps 100 --eval_iters 1 --lr 1e-3 "
        "--acceptance_samples 2 --acceptance_max_new_tokens 4 --report_to none"
    ).split()


@pytest.fixture
def dataset(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


@pytest.fixture
def sft(model, dataset) -> list[str]:
    return sft_options(model, dataset)


def read_metrics(run: Path) -> list[dict]:
    """Return metrics.jsonl without values that depend on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [untimed(line) for line in lines]
