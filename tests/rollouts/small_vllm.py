"""Define a server with those routes of vLLM that `ServedVllm` uses. It generates with the engine of transformers."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from swiftlite.args.serving_fields import FILTERS
from swiftlite.data.template import load_tokenizer
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.stop_strings import stop_strings
from swiftlite.engines.vllm.live.weight_transport import BACKENDS
from tests.engines.small_server import serving

_numbers = itertools.count()
_loads = threading.Lock()
"""Held while a model is loaded. `from_pretrained` replaces a method of `PreTrainedModel` and restores it afterwards; if
two servers load at the same time, the method stays replaced, and later models are not tied."""


class SmallVllm:
    """The server, which can die and start again.

    Attributes:
        config: what /server_info returns.
        before: called with the path of each request before it is answered.
        delay: seconds before each completion.
        holds: whether completions in progress have to wait.
        is_dead: whether it closes every connection without an answer.
        finish_reason: of all completions; None: the real one.
        change: called with the path of each request and its answer; returns the answer that is sent.
        num_completed: number of completions since its start.
        num_updates: number of complete transfers since its start, of the trunk or of the heads.
        most_in_flight: maximum number of unfinished completions.
    """

    def __init__(self, model: Path, num_drafts: int = 1):
        self.model, self.num_drafts = model, num_drafts
        self.before: Callable[[str], None] = lambda path: None
        self.delay = 0.0
        self.holds: Callable[[], bool] = lambda: False
        self.most_in_flight = self.num_in_flight = 0
        self.finish_reason: str | None = None
        self.change: Callable[[str, Any], Any] = lambda path, answer: answer
        self.start()

    def start(self) -> None:
        """Start, or start again, with the weights of the files."""
        config = EngineConfig(
            resolve_served(self.model),
            "float32",
            num_speculative_tokens=self.num_drafts,
            max_model_len=128,
            draws_drafts=True,
        )
        with _loads:
            self.engine: Any = start_engine("transformers", config)
        self.is_dead = self.is_paused = False
        self.num_completed = self.num_updates = 0
        self._received: list[dict[str, torch.Tensor]] = []
        self._lock = threading.Lock()
        self.config: dict[str, Any] = {
            "instance_id": str(next(_numbers)),
            "weight_transfer_config": {"backend": BACKENDS["file"]},
            "parallel_config": {
                "world_size": 1,
                "data_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "enable_expert_parallel": False,
            },
            "model_config": {
                "model": str(self.model),
                "max_model_len": 128,
                "logprobs_mode": "processed_logprobs",
            },
            "speculative_config": {"method": "mtp", "num_speculative_tokens": self.num_drafts}
            if self.num_drafts
            else None,
        }

    async def respond(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        self.before(request.path)
        answer = None
        if not self.is_dead:
            answer = await self._answer(request.path, body)
        if self.is_dead:
            assert request.transport is not None
            request.transport.abort()
        answer = self.change(request.path, answer)
        if isinstance(answer, str):
            return web.Response(text=answer)
        return web.json_response(answer or {})

    async def _answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/completions":
            return await self._complete(body)
        if path in ("/pause", "/resume"):
            self.is_paused = path == "/pause"
        if path == "/update_weights":
            self._received.append(load_file(body["update_info"]["path"]))
        if path in ("/start_weight_update", "/start_draft_weight_update"):
            self._part = "draft" if "draft" in path else "target"
        if path == "/finish_weight_update":
            with _loads:
                self.engine.update_weights(**{self._part: self._received})
            self._received = []
            self.num_updates += 1
        answers = {
            "/server_info": {"vllm_config": self.config},
            "/is_paused": {"is_paused": self.is_paused},
            "/weight_info": {"weight_version": "default"},
            "/reset_prefix_cache": {"success": True},
            "/metrics": self._metrics(),
        }
        return answers.get(path)

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        await asyncio.sleep(self.delay)
        while self.holds():
            await asyncio.sleep(0.01)
        sampling = Sampling(
            body["max_tokens"],
            temperature=body["temperature"],
            **{name: body[name] for name in FILTERS},
            stop_strings=stop_strings(body["stop"] or (), load_tokenizer(self.model) if body["stop"] else None),
            seed=body["seed"],
            stop_token_ids=tuple(body["stop_token_ids"]),
            log_p=body["logprobs"] == 0,
        )

        def generate() -> Any:
            with self._lock:
                return self.engine.generate([body["prompt"]], sampling)[0]

        completion = await asyncio.to_thread(generate)
        self.num_in_flight -= 1
        self.num_completed += 1
        choice = {
            "token_ids": completion.token_ids,
            "finish_reason": self.finish_reason or completion.finish_reason,
            "logprobs": {"token_logprobs": completion.log_p},
        }
        return {"choices": [choice]}

    def _metrics(self) -> str:
        if not self.num_drafts:
            return ""
        counts = self.engine.draft_counts()
        lines = [f"num_drafts_total {counts.drafts}", f"num_draft_tokens_total {counts.drafted}"]
        for position, number in enumerate(counts.accepted_per_position):
            lines.append(f'num_accepted_tokens_per_pos_total{{position="{position}"}} {number}')
        return "".join(f"vllm:spec_decode_{line}\n" for line in lines)


@contextmanager
def started(server: SmallVllm) -> Iterator[str]:
    """Yield the address of a server."""
    with serving(server.respond) as url:
        yield url
