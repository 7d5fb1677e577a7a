"""Test that a server that hangs does not block its client forever, and the errors and states of the client.

tests/e2e/test_sampling_options.py uses a real vLLM.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from swiftlite.base.errors import UserError
from swiftlite.engines.engine import Sampling
from swiftlite.engines.vllm.live.weight_transport import BACKENDS
from swiftlite.engines.vllm.served import LostServer, ServedVllm
from tests.engines.small_server import serving
from tests.messages import mentions
from tests.tiny import make_tiny_hf

TIMEOUT = 1


class Hanging:
    """A server that answers like a vLLM with --live_weights, but on some paths never, or late.

    Attributes:
        stages: number of its pipeline stages.
        seconds: time of the first request to a path. The second request takes twice as long, and so on.
        too_many: number of further requests to a path that are answered with status 429.
    """

    def __init__(self, model: Path):
        self.model = model
        self.stages = 1
        self.seconds: dict[str, float] = {}
        self.too_many: Counter[str] = Counter()
        self.asked: list[str] = []

    async def respond(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        await asyncio.sleep(self.seconds.get(request.path, 0) * self.asked.count(request.path))
        if self.too_many[request.path]:
            self.too_many[request.path] -= 1
            return web.Response(status=429, headers={"Retry-After": "0"}, text="slow down")
        answers = {
            "/server_info": {
                "vllm_config": {
                    "weight_transfer_config": {"backend": BACKENDS["file"]},
                    "parallel_config": {
                        "world_size": self.stages,
                        "data_parallel_size": 1,
                        "pipeline_parallel_size": self.stages,
                        "enable_expert_parallel": False,
                    },
                    "model_config": {"model": str(self.model), "max_model_len": 64},
                    "speculative_config": None,
                    "instance_id": "1",
                }
            },
            "/is_paused": {"is_paused": False},
            "/weight_info": {"weight_version": "default"},
            "/reset_prefix_cache": {"success": True},
            "/v1/completions": {"choices": [{"token_ids": [1], "finish_reason": "length"}]},
        }
        return web.json_response(answers.get(request.path, {}))


@contextmanager
def started(tmp_path, timeout: float = TIMEOUT) -> Iterator[tuple[Hanging, ServedVllm]]:
    server = Hanging(make_tiny_hf(tmp_path / "model", "qwen3"))
    with serving(server.respond) as url:
        yield server, ServedVllm(url, timeout=timeout)


def refused(action) -> UserError:
    begin = time.monotonic()
    with pytest.raises(UserError) as refusal:
        action()
    assert time.monotonic() - begin < 20  # and not for ever; the machine may be busy
    return refusal.value


def test_weights_for_a_server_of_two_stages_are_refused_before_it_pauses(tmp_path):
    server = Hanging(make_tiny_hf(tmp_path / "model", "qwen3"))
    server.stages = 2
    with serving(server.respond) as url:
        engine = ServedVllm(url, timeout=TIMEOUT)
        asked = len(server.asked)
        error = refused(lambda: engine.update_weights([load_trunk(server)]))
        assert mentions(error.problem, "2")
        assert server.asked[asked:] == []
        assert len(engine.generate([[1]], Sampling(1))) == 1


def test_an_answer_that_never_comes(tmp_path):
    with started(tmp_path) as (server, engine):
        server.seconds["/v1/completions"] = 60
        error = refused(lambda: engine.generate([[1, 2], [3]], Sampling(1)))
        assert mentions(error.problem, "/v1/completions 1")
        assert mentions(error.hint, "ServedVllm")
        server.seconds.clear()
        assert [each.token_ids for each in engine.generate([[1, 2], [3]], Sampling(1))] == [[1], [1]]


def test_a_proxy_that_limits_the_rate_is_asked_again(tmp_path):
    with started(tmp_path) as (server, engine):
        server.too_many["/v1/completions"] = 3
        assert [each.token_ids for each in engine.generate([[1, 2], [3]], Sampling(1))] == [[1], [1]]
        assert server.asked.count("/v1/completions") == 5
        server.too_many["/v1/completions"] = 10**9
        error = refused(lambda: engine.generate([[1]], Sampling(1)))
        assert isinstance(error, LostServer)  # its prompts are given to other servers


def test_answers_that_follow_each_other_are_in_time(tmp_path):
    """The timeout applies to each answer, not to all answers together."""
    with started(tmp_path, timeout=3) as (server, engine):
        server.seconds["/v1/completions"] = 0.5
        begin = time.monotonic()
        assert len(engine.generate([[1]] * 8, Sampling(1))) == 8
        assert time.monotonic() - begin > 3


def test_a_server_that_does_not_pause_keeps_its_weights(tmp_path):
    with started(tmp_path) as (server, engine):
        server.seconds["/pause"] = 60
        error = refused(lambda: engine.update_weights([load_trunk(server)]))
        assert mentions(error.problem, "/pause?mode=wait 1")
        assert server.asked[-2:] == ["/pause", "/resume"]
        server.seconds["/resume"] = 60
        error = refused(lambda: engine.update_weights([load_trunk(server)]))
        assert mentions(error.problem, "/resume")
        server.seconds.clear()
        engine.update_weights([load_trunk(server)])


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_server_that_hangs_in_an_update_answers_no_more(tmp_path, path):
    with started(tmp_path) as (server, engine):
        server.seconds[path] = 60
        error = refused(lambda: engine.update_weights([load_trunk(server)]))
        assert mentions(error.problem, f"{path} 1")
        assert "/resume" not in server.asked
        asked = len(server.asked)
        refused(lambda: engine.generate([[1]], Sampling(1)))
        assert len(server.asked) == asked


def test_a_server_that_hangs_behind_an_update_has_whole_weights(tmp_path):
    with started(tmp_path) as (server, engine):
        server.seconds |= {"/update_weight_version": 60, "/resume": 60}
        error = refused(lambda: engine.update_weights([load_trunk(server)]))
        assert mentions(error.problem, "/resume")


def load_trunk(server: Hanging) -> dict[str, torch.Tensor]:
    return load_file(server.model / "model.safetensors")
