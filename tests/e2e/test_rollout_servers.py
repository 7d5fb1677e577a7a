"""Test `megatron grpo --rollout_server` with two real vLLM servers, which are killed and restarted during the run.
Completions are conversations of two answers.

There is only one test, so that each server starts as rarely as possible. tests/rollouts/test_servers.py tests more
failures, with small servers.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from swiftlite.engines.vllm.served import COMPLETIONS
from swiftlite.rollouts.generation import Generation
from tests.e2e.conftest import Commands
from tests.e2e.servers import running, wait_for_health
from tests.engines.small_server import serving
from tests.stand_ins import forking_vllm_environment
from tests.tiny import make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
PORTS = (8143, 8144)
REWARDS = """
import time
from pathlib import Path


def even(completion_ids, step):
    Path("scored-" + str(step)).touch()
    while not Path("go-" + str(step)).exists():
        time.sleep(0.05)
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


async def talk(messages, generate):
    messages = [*messages, await generate(messages, max_tokens=6), {"role": "user", "content": "Why?"}]
    return [*messages, await generate(messages)]
"""


class Server:
    """A server of `swiftlite deploy --live_weights`.

    Attributes:
        url: its own address.
        before: called with the path of each request that `forward` receives.
    """

    def __init__(self, model: Path, port: int, log: Path):
        self.url, self._log = f"http://127.0.0.1:{port}", log
        words = f"deploy --model {model} --torch_dtype float32 --port {port} --max_model_len 128 --live_weights"
        self.before: Callable[[str], None] = lambda path: None
        self._command = [sys.executable, "-m", "swiftlite", *words.split()]
        self._stack = ExitStack()

    def start(self) -> None:
        self.process: subprocess.Popen = self._stack.enter_context(running(self._command, self._log))

    def wait(self) -> None:
        wait_for_health(self.process, self.url, self._log)

    def kill(self) -> None:
        """Kill all its processes with kill -9."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    async def forward(self, request: web.Request) -> web.Response:
        """Answer a request to another address as the server does. If the server is dead, close the connection."""
        self.before(request.path)
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.request(request.method, self.url + request.path_qs, data=await request.read()) as response,
            ):
                body = await response.read()
                return web.Response(status=response.status, body=body, content_type=response.content_type)
        except aiohttp.ClientError:
            assert request.transport is not None
            request.transport.close()
            raise

    def close(self) -> None:
        self._stack.close()


def until(condition: Callable[[], object], process) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_servers_are_killed_and_restarted(tmp_path, monkeypatch):
    for name, value in forking_vllm_environment().items():
        monkeypatch.setenv(name, value)
    model = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, with_tokenizer=True)
    rows = [{"query": f"What is {n} plus {n}?"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    stays, dies = (Server(model, port, tmp_path / f"{port}.log") for port in PORTS)
    with ExitStack() as stack:
        for server in (stays, dies):
            stack.callback(server.close)
            server.start()
        for server in (stays, dies):
            server.wait()
        address = stack.enter_context(serving(dies.forward))
        words = (
            f"megatron grpo --model {model} --dataset rows.jsonl --split_dataset_ratio 0 --torch_dtype float32 "
            "--reward_funcs even --external_plugins rewards.py --reward_timeout 300 --num_generations 4 "
            "--rollout_func talk "
            "--global_batch_size 24 --num_iterations 2 --train_iters 8 --micro_batch_size 8 --max_length 128 "
            "--max_completion_length 64 --max_batch_size 2 --temperature 0.7 --lr 1e-2 "
            f"--acceptance_samples 0 --report_to none --output_dir run --rollout_server {stays.url} {address}"
        )
        run = Commands(tmp_path).start_for_real(*words.split())
        stack.callback(run.kill)

        def scored(step: int) -> None:
            until((tmp_path / f"scored-{step}").exists, run)

        def go(step: int) -> None:
            (tmp_path / f"go-{step}").touch()

        scored(1)
        dies.kill()  # before the weights of the second generation are sent
        go(1)
        scored(3)
        dies.start()
        dies.wait()
        go(3)
        scored(5)
        num_asked = 0

        def kill_in_generation(path: str) -> None:
            nonlocal num_asked
            num_asked += path == COMPLETIONS
            if num_asked == 2 and dies.process.poll() is None:
                dies.kill()

        dies.before = kill_in_generation
        go(5)  # the fourth generation: its first request is in progress or finished, and its second one arrives
        scored(7)
        go(7)
        _, errors = run.communicate(timeout=200)
        assert run.returncode == 0, errors
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/servers"] for line in lines[::2]] == [2, 1, 2, 1]
    assert [line["rollout/repeated_requests"] > 0 for line in lines[::2]] == [False, False, False, True]
    assert all(0 < line["rollout/acceptance_1"] < 1 for line in lines)
    assert address in errors
    for number in range(4):
        generation = Generation.load(tmp_path / "run" / "rollouts" / f"{number:06d}.safetensors")
        # Every server has the current weights. Kernels of vLLM and torch add in another order. Tokens between the
        # answers have no log-probability on either side.
        np.testing.assert_allclose(generation.engine_log_p, generation.old_log_p, rtol=0, atol=1e-3)
        assert np.array_equal(np.isnan(generation.engine_log_p), ~generation.is_generated)
        assert not generation.is_generated.all()
        assert len(set(map(tuple, generation.completions()))) > 6  # not one per prompt: seeds differ
