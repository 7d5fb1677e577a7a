"""Test adding an engine: an `EngineInfo`, an `Engine` class and, for a server, a command, a client and a dry load.

The engine of this file decodes greedily with transformers' trunk, and the first MTP head drafts. It has no cache, so
drafts save no time, but it counts them like every engine. The tests add its `EngineInfo` to the table of engines; every
command then supports the engine.

As a program, this file is the engine's server, or swiftlite with the engine:

    python -m tests.growth.test_engine serve MODEL_DIR PORT NUM_SPECULATIVE_TOKENS
    python -m tests.growth.test_engine swiftlite infer --infer_backend plain ...
"""

import json
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.commands import DeployArgs
from swiftlite.base.errors import UserError
from swiftlite.cli.main import main
from swiftlite.engines.client import Answer, stream
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.engine import Completion, EngineConfig, OnAnswer, Sampling, check_prompts, start_engine
from swiftlite.engines.index import ENGINES
from swiftlite.engines.info import EngineInfo
from swiftlite.engines.loading.load_report import LoadReport
from swiftlite.engines.served_model import require_heads, resolve_served
from swiftlite.engines.server_command import ServerCommand
from swiftlite.engines.transformers.draft_generator import DraftGenerator
from swiftlite.engines.transformers.engine import load_trunk
from swiftlite.engines.transformers.mtp_heads import MtpSteps, load_heads
from swiftlite.families import Family
from swiftlite.families.resolved import HfModel
from swiftlite.families.serving.convention import Convention
from swiftlite.families.serving.index import CONVENTIONS
from tests.engines.reference import Reference
from tests.forked import Host
from tests.messages import answers_equal, has_line, mentions

HERE = "tests.growth.test_engine"
ROOT = Path(__file__).parents[2]

# 1. The record. What it names is loaded when a command uses it.
PLAIN = EngineInfo(
    name="plain",
    label="Plain",
    package="transformers",
    distributions=("transformers",),
    install="pip install transformers",
    adapter=f"{HERE}:PlainEngine",
    is_batched=False,
    server=f"{HERE}:server_command",
    client=f"{HERE}:PlainClient",
    dry_load=f"{HERE}:look",
)


# 2. How it drafts: of several heads the first one, fed the trunk's state after its final norm.
def convention(family: Family) -> Convention:
    return Convention("MtpHead", "first")


# 3. The engine, for `infer` and `evaluate`.
class PlainEngine:
    """An `Engine` without a cache."""

    def __init__(self, config: EngineConfig):
        model = config.model
        self.num_speculative_tokens = 1 if config.num_speculative_tokens is None else config.num_speculative_tokens
        trunk: Any = load_trunk(config)
        self._decoder = trunk.get_decoder()
        self._output_layer = trunk.get_output_embeddings()
        self._max_length = config.max_model_len or trunk.config.max_position_embeddings
        self._counts = DraftCounts(0, 0, (0,) * self.num_speculative_tokens)
        if self.num_speculative_tokens:
            require_heads(model)
            heads = load_heads(model, self._decoder)[:1]
            drafting = convention(model.family).drafting
            steps = MtpSteps(self._decoder, self._output_layer, heads, self.num_speculative_tokens, drafting)
            self._drafter = DraftGenerator(steps)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_answer: OnAnswer | None = None
    ) -> list[Completion]:
        check_prompts(prompts, self._max_length)
        completions = []
        for place, prompt in enumerate(prompts):
            completions.append(self._complete(prompt, sampling))
            if on_answer:
                on_answer(place, completions[place])
        return completions

    def draft_counts(self) -> DraftCounts:
        return self._counts

    def close(self) -> None:
        """Do nothing, because there are no processes and files."""

    @torch.inference_mode()
    def _complete(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        ids = [*prompt, self._next(prompt)]
        limit = min(len(prompt) + sampling.max_new_tokens, self._max_length)
        while len(ids) < limit and ids[-1] not in sampling.stop_token_ids:
            drafts = self._draft(ids)
            accepted = [0] * len(drafts)
            for position, draft in enumerate([*drafts, None]):
                ids.append(self._next(ids))
                if ids[-1] != draft:
                    break
                accepted[position] = 1
                if len(ids) == limit or draft in sampling.stop_token_ids:
                    break
            if drafts:
                self._counts += DraftCounts(1, len(drafts), tuple(accepted))
        stopped = ids[-1] in sampling.stop_token_ids
        return Completion(ids[len(prompt) :], "stop" if stopped else "length")

    def _states(self, ids: Sequence[int]) -> torch.Tensor:
        return self._decoder(input_ids=torch.tensor([list(ids)]), use_cache=False).last_hidden_state

    def _next(self, ids: Sequence[int]) -> int:
        """Return the trunk's next token."""
        return int(self._output_layer(self._states(ids)[0, -1]).argmax())

    def _draft(self, ids: Sequence[int]) -> list[int]:
        """Return the head's drafts after the newest token, which the trunk has not processed yet."""
        if not self.num_speculative_tokens:
            return []
        known: Any = (self._states(ids[:-1]),)
        tokens = torch.tensor([list(ids)])
        self._drafter.get_candidates(tokens, is_first_iteration=True)
        drafted, _ = self._drafter.get_candidates(tokens, model_outputs=BaseModelOutput(hidden_states=known))
        return drafted[0, len(ids) :].tolist()


# 4. Its server and the client of it, for `deploy` and `bench`.
def server_command(args: DeployArgs, model: HfModel, drafts: bool, schedule: DraftSchedule | None) -> ServerCommand:
    if schedule is not None:
        raise UserError("plain drafts as many tokens at every load", "leave --draft_schedule out")
    num_tokens = (args.num_speculative_tokens or 1) if drafts else 0
    words = [sys.executable, "-m", HERE, "serve", str(model.directory.absolute()), str(num_tokens)]
    return ServerCommand([*words, "--port", str(args.port)], {"PYTHONPATH": str(ROOT)})


def serve(directory: str, num_tokens: str, _: str, port: str) -> None:
    """Answer each POST request with one event: the tokens, and their draft counts."""
    engine = PlainEngine(EngineConfig(resolve_served(directory), "float32", num_speculative_tokens=int(num_tokens)))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            before = engine.draft_counts()
            sampling = Sampling(asked["max_new_tokens"], stop_token_ids=tuple(asked["stop_token_ids"]))
            (completion,) = engine.generate([asked["prompt"]], sampling)
            counts = engine.draft_counts().since(before)
            event = {
                "token_ids": completion.token_ids,
                "counts": [counts.drafts, counts.drafted, counts.accepted_per_position],
            }
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


class PlainClient:
    """A `Client` of the server in this file."""

    def __init__(self, session: aiohttp.ClientSession, sampling: Sampling, num_speculative_tokens: int):
        self._session = session
        self._sampling = sampling
        self._counts = DraftCounts(0, 0, (0,) * num_speculative_tokens)

    async def answer(self, prompt: Sequence[int], salt: str) -> Answer:
        """Complete a prompt, as `Client.answer` specifies. The engine has no prefix cache, so the salt is ignored."""
        request = {
            "prompt": list(prompt),
            "max_new_tokens": self._sampling.max_new_tokens,
            "stop_token_ids": list(self._sampling.stop_token_ids),
        }
        ((seconds, event),) = await stream(self._session, "/", request)
        drafts, drafted, accepted = event["counts"]
        counts = DraftCounts(drafts, drafted, tuple(accepted))
        self._counts += counts
        return Answer(str(event["token_ids"]), len(event["token_ids"]), seconds, seconds, counts)

    async def draft_counts(self) -> DraftCounts:
        return self._counts

    async def cached_tokens(self) -> int:
        return 0


# 5. What its loader makes of a checkpoint, for `doctor --engine`.
def look(config: EngineConfig) -> LoadReport:
    model = config.model
    problems = []
    try:
        require_heads(model)
    except UserError as error:
        problems.append(error.problem)
    num_drafting = convention(model.family).num_drafting(model.heads.layers)
    return LoadReport("plain 1", "Qwen3ForCausalLM", "MtpHead", model.heads.layers, num_drafting, problems=problems)


@pytest.fixture
def added(monkeypatch) -> None:
    """Add the engine to the table, and let other processes find this file."""
    monkeypatch.setitem(ENGINES, PLAIN.name, PLAIN)
    monkeypatch.setitem(CONVENTIONS, PLAIN.name, convention)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module")
def model(talking) -> Path:
    return talking[0]


@pytest.fixture
def rows(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    questions = [{"query": f"What is {n}?", "response": "Much.", "channel": "sums"} for n in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in questions))
    return path


def swiftlite(*words: object) -> int:
    return main([str(word) for word in words])


def test_its_tokens_and_counts_are_those_of_a_reference(added, model):
    prompts = [[1, 2, 3], [40], [7, 8]]
    engine = start_engine("plain", EngineConfig(resolve_served(model), "float32", num_speculative_tokens=None))
    completions = engine.generate(prompts, Sampling(12))
    expected, counts = Reference.load(model, "qwen3", 1).simulate(prompts, 12, 1)
    assert [completion.token_ids for completion in completions] == expected
    assert engine.draft_counts() == DraftCounts(counts.drafts, counts.drafted, counts.accepted_per_position)


def test_infer(added, model, rows, tmp_path, capsys):
    options = ["--speculative", "mtp", "--compare", "--max_new_tokens", 8, "--max_batch_size", 4]
    where = ["--model", model, "--torch_dtype", "float32", "--val_dataset", rows]
    assert swiftlite("infer", "--infer_backend", "plain", *where, *options) == 0
    shown = capsys.readouterr()
    assert [json.loads(line)["completion_tokens"] > 0 for line in shown.out.splitlines()] == [True, True]
    assert answers_equal(shown.err, 2)
    assert has_line(shown.err, "--max_batch_size 4 Plain")


def test_evaluate(model, rows, tmp_path):
    """The command runs in a separate process, because it creates megatron-core's groups."""
    words = ["evaluate", "--model", model, "--dataset", rows, "--output_dir", tmp_path / "out", "--max_new_tokens", 8]
    host = Host([], {})
    assert host.call(with_engine, [*map(str, words), "--infer_backend", "plain", "--torch_dtype", "float32"]) == 0
    host.close()
    measured = json.loads((tmp_path / "out" / "evaluation.json").read_text())["model"]["plain"]
    assert measured.keys() == {"all", "sums"}
    assert measured["all"]["drafts"] > 0


def test_deploy(added, model, capsys):
    assert swiftlite("deploy", "--infer_backend", "plain", "--model", model, "--port", 8123, "--dry_run") == 0
    assert f"serve {model} 1 --port 8123" in capsys.readouterr().out


def test_help_and_refusals(added, capsys):
    swiftlite("infer", "--help")
    assert "--infer_backend transformers|vllm|sglang|llamacpp|plain" in capsys.readouterr().out
    assert swiftlite("deploy", "--infer_backend", "plane") == 2
    refusal = capsys.readouterr().err
    assert mentions(refusal, "--infer_backend vllm sglang llamacpp plain 'plane'")


def with_engine(words: list[str]) -> int:
    """Run a command in a process that has the engine in its table."""
    ENGINES[PLAIN.name], CONVENTIONS[PLAIN.name] = PLAIN, convention
    return main(words)


if __name__ == "__main__":
    serve(*sys.argv[2:])
