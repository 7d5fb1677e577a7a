"""Test real SGLang in float32: its tokens and draft counts must equal those of an independent reference.

Scheduler, drafting worker, weight loaders and model classes are SGLang's, except the classes of swiftlite's plugin. Its
compiled kernels and torchvision have stand-ins (tests/sglang_stand_ins), because PyPI has them only for CUDA.
"""

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.engines.client import Answer
from swiftlite.engines.engine import Sampling
from swiftlite.engines.server.process import serve
from swiftlite.engines.server_command import ServerCommand
from swiftlite.families import FAMILIES
from swiftlite.families.eagle3 import SGLANG_TRUNKS
from swiftlite.serve.bench.measure import connect, generate_all
from tests.e2e.drafted import exported, write_drafted
from tests.engines.eagle3_reference import Eagle3Reference
from tests.engines.reference import UNDECIDED, Reference, convention, follow, with_vocab
from tests.messages import mentions
from tests.stand_ins import sglang_environment
from tests.tiers import selected, some_of
from tests.tiny import LATENT, VLLM_LATENT_SIZES, make_tiny_hf, make_tiny_tokenizer
from tests.train.pairs import open_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
HERE = Path(__file__).parent
NEW_TOKENS = 24
TWICE = ("llama", "qwen2", "qwen3", "mimo")
CASES = [(family, k) for family in TWICE for k in (1, 3)]
CASES += [("glm4_moe", 3), ("deepseek_v3", 3), ("qwen3_moe", 2), ("ernie4_5_moe", 3), ("mimo_v2_flash", 1)]
CASES += [("step3p5", 1)]  # a head for each draft token
PLUGIN = [name for name, family in FAMILIES.items() if family.serving.sglang and family.serving.sglang.classes]
# Mistral's layers are Llama's.
CASES += [(family, 3) for family in PLUGIN if family not in (*TWICE, "mistral")]
# A family with a draft class of swiftlite, and one with a class of SGLang and a kind of layer of its own. The first of
# several drafts is a single draft, which `infer` uses here.
CHOSEN = [("qwen3", 3), ("deepseek_v3", 3)]
WITH_VOCAB = some_of(("qwen3", "mimo"), "qwen3")
# Each with a draft class, or a kind of layer, that takes new weights in a way of its own.
LIVE = some_of(("mimo", "glm4_moe", "qwen3_moe", "deepseek_v3"), "deepseek_v3")
EAGLE3: Any = [(family, "3.1") for family in SGLANG_TRUNKS] + [("qwen3", "3.0")]
"""Families and versions of EAGLE-3 drafters."""
DRAWN = some_of([(3, 0.0), (0, 0.7), (3, 0.7), (3, 1.0)], (3, 0.7))
"""Numbers of draft tokens and temperatures of answers. Sampled drafts are verified as on a GPU."""
# Otherwise SGLang takes most of the memory for its cache, and 20 s to fill it with zeros.
SMALL = ["--sglang_engine_kwargs", '{"max_total_tokens": 4096, "max_running_requests": 4}']


def run_python(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=sglang_environment(), timeout=1800)


def do_all(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run all jobs in one process that imports SGLang once; return the results."""
    done = run_python(HERE / "serve_sglang.py", json.dumps(jobs))
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(jobs), done.stderr[-3000:]
    return lines


def load(directory: Path, family: str) -> Reference:
    """Return the reference, which drafts as the convention of SGLang specifies."""
    return follow(Reference.load(directory, family, depth=1), convention("sglang", family).drafting)


@dataclass(frozen=True)
class Commands:
    """The command line of `infer`, with the files that it writes."""

    directory: Path
    talking: Path

    def infer(self, *options: str, answers: str = "own.jsonl") -> list[str]:
        prompts = self.directory / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"query": f"What is {i} plus {i}?"}) + "\n" for i in range(6)))
        files = ["--val_dataset", str(prompts), "--result_path", str(self.directory / answers)]
        fixed = f"infer --infer_backend sglang --torch_dtype float32 --max_new_tokens 40 --model {self.talking}"
        return [*fixed.split(), "--speculative", "mtp", *SMALL, *files, *options]


@pytest.fixture(scope="module")
def commands(talking, tmp_path_factory) -> Commands:
    return Commands(tmp_path_factory.mktemp("commands"), talking[0])


@pytest.fixture(scope="module")
def served(request, trained, commands, mesh, tmp_path_factory) -> dict[Any, Any]:
    """Return by (family, draft tokens per step) the checkpoint, the prompts and SGLang's results.

    All jobs share one process.
    """
    folder = tmp_path_factory.mktemp("models")
    needed = {*selected(request, "family", "num_tokens"), *CHOSEN}
    needed |= {(family, dict(CASES)[family]) for family in selected(request, "live")}
    cases = [case for case in CASES if case in needed]
    models: dict[Any, Any] = {family: trained(family, 1, "sglang") for family in dict(cases)}
    damaged = make_tiny_hf(folder / "damaged", "mimo", depth=1)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 5)
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    with_vocabulary = selected(request, "with_vocabulary")
    for family in with_vocabulary:
        directory, prompts = models[family]
        reference = load(directory, family)
        reference.draft_vocab = [token for token in range(reference.trunk.config.vocab_size) if token % 4]
        models[f"{family}, draft vocabulary"] = (
            with_vocab(directory, folder / f"{family}-vocab", reference.draft_vocab),
            [prompt for prompt in prompts if reference.closest_choice(prompt, NEW_TOKENS, 3) > UNDECIDED],
        )
    cases += [(f"{family}, draft vocabulary", 3) for family in with_vocabulary]
    jobs = [
        {"model": str(models[name][0]), "prompts": models[name][1], "num_tokens": k, "max_new_tokens": NEW_TOKENS}
        for name, k in cases
    ]
    live = {}
    for family in selected(request, "live"):
        sizes = VLLM_LATENT_SIZES if family in LATENT else {}
        started = make_tiny_hf(folder / f"{family}-started", family, depth=1, **sizes)
        of_trained = jobs[cases.index((family, dict(CASES)[family]))]
        live[f"{family}, live"] = of_trained | {"model": str(started), "weights_of": of_trained["model"]}
    unknown = jobs[0] | {"engine_kwargs": {"max_modle_len": 3}}
    drafting = jobs[cases.index(("qwen3", 3))]
    drawn = {
        ("qwen3", k, temperature): drafting | {"num_tokens": k, "temperature": temperature}
        for k, temperature in selected(request, "num_tokens", "temperature")
        if temperature
    }
    asks_twice = {"model": str(commands.talking), "rollout_func": str(HERE / "asks_twice.py"), "max_new_tokens": 60}
    conversations = {
        ("conversations", k): asks_twice | {"num_tokens": k, "temperature": 0.7} for k in selected(request, "drafted")
    }
    eagle3: dict[Any, Any] = {}
    for family, version in selected(request, "family", "version"):
        directory = folder / f"{family}-eagle{version}"
        prompts = write_drafted(directory / "model", f"eagle{version}", family)
        exported(directory / "model", directory, mesh)
        models[family, version] = (directory / "model", prompts)
        eagle3[family, version] = {
            "model": str(directory / "hf"),
            "prompts": prompts,
            "num_tokens": 3,
            "max_new_tokens": NEW_TOKENS,
        }
    (commands.directory / "acceptance.json").write_text('{"depths": 1}')
    acceptance = ("--acceptance_json", str(commands.directory / "acceptance.json"))
    others: dict[Any, Any] = {
        **live,
        **drawn,
        **eagle3,
        **conversations,
        "unknown option": unknown,
        "damaged": jobs[0] | {"model": str(damaged)},
        "infer": {"argv": commands.infer(*acceptance)},
    }
    lines = do_all([*jobs, *others.values()])
    results: dict[Any, Any] = {case: (*models[case[0]], line) for case, line in zip(cases, lines, strict=False)}
    results |= zip(others, lines[len(jobs) :], strict=True)
    results |= {case: (*models["qwen3"], results[case]) for case in drawn}
    results |= {case: (*models[case], results[case]) for case in eagle3}
    results["qwen3", 3, 0.0] = results["qwen3", 3]
    return results


@pytest.mark.parametrize(("family", "num_tokens"), some_of(CASES, *CHOSEN))
def test_tokens_and_counts_equal_the_reference(served, family, num_tokens):
    directory, prompts, result = served[family, num_tokens]
    expected, counts = load(directory, family).simulate(prompts, NEW_TOKENS, num_tokens)
    assert 0.1 < counts.accepted_per_position[0] / counts.drafts < 0.9  # some right, some wrong
    assert result["tokens"] == expected
    assert result["reasons"] == ["length"]
    assert result["counts"] == [counts.drafts, counts.drafted, list(counts.accepted_per_position)]
    stop = expected[0][5]
    assert result["stopped"] == [expected[0][: expected[0].index(stop) + 1], "stop"]
    too_long, random = result["refused"]
    assert mentions(too_long, "256 --max_model_len")
    assert mentions(random, "--temperature 0.5 SGLang CPU")


@pytest.mark.parametrize(("family", "version"), some_of(EAGLE3, ("qwen3", "3.1")))
def test_eagle3_drafters_equal_the_reference(served, family, version):
    directory, prompts, result = served[family, version]
    expected, counts = Eagle3Reference.load(directory, family).simulate(prompts, NEW_TOKENS, 3)
    assert result["tokens"] == expected
    assert result["counts"] == [counts.drafts, counts.drafted, list(counts.accepted_per_position)]
    assert 0.1 < counts.accepted_per_position[0] / counts.drafts < 0.95


@pytest.mark.parametrize(("num_tokens", "temperature"), DRAWN)
def test_log_probabilities_are_those_of_transformers(served, num_tokens, temperature):
    """Without a temperature, the log-probabilities are those at temperature 1."""
    directory, prompts, result = served["qwen3", num_tokens, temperature]
    if num_tokens and temperature:
        drafts, _, accepted = result["counts"]
        assert 0 < accepted[0] < drafts
        assert result["tokens"] != served["qwen3", 3][2]["tokens"]
    model = open_hf(directory)
    temperature = temperature or 1.0
    for prompt, tokens, log_p in zip(prompts, result["tokens"], result["log_p"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0] / temperature
        ids = torch.tensor(tokens)
        wanted = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, ids[:, None])[:, 0]
        # Float32 products in another order.
        torch.testing.assert_close(torch.tensor(log_p), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("drafted", some_of([0, 3], 3))
def test_conversations_have_the_log_probabilities_of_transformers(served, commands, drafted):
    """Of generated tokens; messages of the function between answers have none."""
    result = served["conversations", drafted]
    assert result["figures"]["rollout/turns"] == 2
    assert result["figures"]["rollout/failures"] == 0
    model = open_hf(commands.talking)
    results = (result[name] for name in ("prompts", "tokens", "log_p", "is_generated"))
    for prompt, tokens, log_p, mask in zip(*results, strict=True):
        changes = [number for number in range(1, len(mask)) if mask[number] != mask[number - 1]]
        assert (mask[0], len(changes)) == (True, 2)
        found = torch.tensor(log_p)
        assert torch.equal(found.isnan(), ~torch.tensor(mask))
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0] / 0.7
        wanted = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(found[mask], wanted[mask], rtol=0, atol=1e-4)


@pytest.mark.parametrize("with_vocabulary", WITH_VOCAB)
def test_drafts_are_of_the_draft_vocabulary(served, with_vocabulary):
    """One draft class is swiftlite's, the other SGLang's. `with_vocabulary` is the family."""
    family = with_vocabulary
    directory, prompts, result = served[f"{family}, draft vocabulary", 3]
    reference = load(directory, family)
    _, counts_of_all = reference.simulate(prompts, NEW_TOKENS, 3)
    reference.draft_vocab = torch.load(directory / "speculative_token_map.pt", weights_only=True)
    expected, counts = reference.simulate(prompts, NEW_TOKENS, 3)
    assert result["tokens"] == expected
    assert result["counts"] == [counts.drafts, counts.drafted, list(counts.accepted_per_position)]
    assert 0 < counts.acceptance_rate < counts_of_all.acceptance_rate


@pytest.mark.parametrize("live", LIVE)
def test_one_that_runs_takes_weights_as_if_started_with_them(served, live):
    """`live` is the family."""
    _, _, started_with_them = served[live, dict(CASES)[live]]
    found = served[f"{live}, live"]
    for name in found.keys() | started_with_them.keys():
        if name != "log_p":
            assert found[name] == started_with_them[name]
    # The number of prompts that are computed together, and with it the order of sums, differs from run to run.
    for log_p, expected in zip(found["log_p"], started_with_them["log_p"], strict=True):
        assert log_p == pytest.approx(expected, abs=1e-4)


def swap_halves(reference: Reference) -> None:
    head: Any = reference.heads[0]
    weight = head["projection"].weight
    weight.data = weight.data.roll(weight.shape[1] // 2, dims=1)


def keep_first_embedding(reference: Reference) -> None:
    reference.zeroes_first_embedding = not reference.zeroes_first_embedding


def take_the_other_state(reference: Reference) -> None:
    reference.takes_state_before_norm = not reference.takes_state_before_norm


@pytest.mark.parametrize("change", [swap_halves, keep_first_embedding, take_the_other_state])
@pytest.mark.parametrize("family", some_of(dict(CASES), "qwen3"))
def test_another_convention_counts_otherwise(served, family, change):
    """If any entry of a convention is changed, the compared results change."""
    num_tokens = dict(CASES)[family]
    directory, prompts, result = served[family, num_tokens]
    reference = load(directory, family)
    change(reference)
    expected, counts = reference.simulate(prompts, NEW_TOKENS, num_tokens)
    assert result["tokens"] == expected
    assert result["counts"] != [counts.drafts, counts.drafted, list(counts.accepted_per_position)]


def test_what_sglang_refuses_is_told(served):
    """Errors before and after the start of SGLang's processes are reported, and this process keeps running."""
    (unknown,) = served["unknown option"]["refused"]
    assert mentions(unknown, "SGLang 'max_modle_len'")
    (damaged,) = served["damaged"]["refused"]
    assert mentions(damaged, "SGLang")


def test_infer(served, commands):
    """test_infer.py and test_evaluate.py compare answers and evaluate with vLLM, which is the same code."""
    assert served["infer"]["code"] == 0, served["infer"]
    assert (commands.directory / "own.jsonl").read_bytes().count(b"\n") == 6
    counted = json.loads((commands.directory / "acceptance.json").read_text())["engines"]["sglang"]
    assert counted["drafted"] > 60
    assert 0 < counted["acceptance_rate"] < 1  # few: it was not trained on chats


@pytest.mark.slow
def test_infer_is_stopped_and_resumed(commands):
    whole, stopped = commands.directory / "whole.jsonl", commands.directory / "stopped.jsonl"
    again = {"argv": commands.infer(answers=stopped.name)}
    done = do_all([{"argv": commands.infer(answers=whole.name)}, again | {"stop_at": [str(stopped), 1]}, again])
    assert [each["code"] for each in done] == [0, 143, 0], done
    assert re.search(rf"swiftlite: .*\b[1-5]\b.*\b6\b.*{stopped}.*\n.*\n$", done[1]["stderr"])
    assert stopped.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_the_printed_command_starts_the_server(commands, tmp_path):
    """The command runs in a shell.

    The server answers an OpenAI client, and the client of `bench`, which counts drafts.
    """
    options = f"--model {commands.talking} --torch_dtype float32 --max_model_len 256 --infer_backend sglang"
    printed = run_python(
        "-m",
        "swiftlite",
        "deploy",
        *options.split(),
        "--infer_backend",
        "sglang",
        "--dry_run",
        SMALL[0],
        SMALL[1][:-1] + ', "enable_metrics": true}',
    )
    (line,) = printed.stdout.splitlines()
    assert "--speculative-algorithm NEXTN --speculative-num-steps 1" in line
    prompts = [[5, 6, 7], [8], [9, 10]]
    expected, counted = load(commands.talking, "qwen3").simulate(prompts, NEW_TOKENS, 1)
    command = ServerCommand(["bash", "-c", f'exec env {line} "$@"', "bash", "--port", "0"], sglang_environment())
    with serve(command, tmp_path / "log") as server:
        from openai import OpenAI  # installed with the engine

        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        question: Any = {"role": "user", "content": "The quick"}
        answer: Any = client.chat.completions.create(
            model="default", messages=[question], max_tokens=20, extra_body={"ignore_eos": True}
        )
        rounds, counts = asyncio.run(ask(server.url, prompts))
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
            metrics = response.read().decode()
    assert answer.usage.completion_tokens == 20
    assert "sglang:spec_accept_length" in metrics
    tokenizer = make_tiny_tokenizer()
    for answers in rounds:
        texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected]  # as the server does
        assert [each.text for each in answers] == texts
        assert [each.num_tokens for each in answers] == [NEW_TOKENS] * len(prompts)
        assert all(0 < each.seconds_to_first < each.seconds for each in answers)
    assert counts == DraftCounts(2 * counted.drafts, 2 * counted.drafted, (2 * counted.accepted_per_position[0],))


async def ask(url: str, prompts: list[list[int]]) -> tuple[list[list[Answer]], DraftCounts]:
    """Return the answers of two rounds of `bench`, and the draft counts of both rounds."""
    async with connect("sglang", url, Sampling(NEW_TOKENS), 1) as client:
        rounds = [await generate_all(client, prompts, concurrency, f"{concurrency}") for concurrency in (1, 2)]
        return [each.answers for each in rounds], await client.draft_counts()
