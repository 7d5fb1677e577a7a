"""Real SGLang, started: its tokens and its own counts against an independent reference, in float32, exactly.

Its scheduler, drafting worker, model classes and weight loaders are its own; only its compiled kernels and torchvision
have stand-ins (tests/sglang_stand_ins), as PyPI has them for CUDA alone.
"""

import importlib.util
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.families.conventions import CONVENTIONS
from tests.infer.reference import Counts, Reference, write_trained
from tests.stand_ins import sglang_environment
from tests.tiny import VLLM_LATENT_SIZES, make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]
HERE = Path(__file__).parent
NEW_TOKENS = 24
CASES = [("mimo", 1), ("mimo", 3), ("glm4_moe", 3), ("deepseek_v3", 3), ("qwen3_moe", 2)]


def run_python(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=sglang_environment(), timeout=1800)


def follow(reference: Reference, family: str) -> Reference:
    """Let the reference draft as the table says of SGLang."""
    convention = CONVENTIONS["sglang"][family]
    reference.takes_state_before_norm = convention.takes == "before norm"
    reference.recycles_state_before_norm = convention.recycles == "before norm"
    reference.zeroes_first_embedding = convention.zeroes_first_embedding
    return reference


def simulate(reference: Reference, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], Counts]:
    return reference.simulate(prompts, NEW_TOKENS, num_tokens)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> dict[Any, Any]:
    """(family, tokens drafted per step) -> (checkpoint, prompts, what SGLang made of them); one process for all."""
    folder = tmp_path_factory.mktemp("models")
    models: dict[str, tuple[Path, list[list[int]]]] = {}
    for family in dict.fromkeys(family for family, _ in CASES):
        sizes: dict[str, Any] = VLLM_LATENT_SIZES | {"lr": 2e-3} if family == "deepseek_v3" else {}
        models[family] = folder / family, write_trained(folder / family, family, depth=1, **sizes)
    damaged = make_tiny_hf(folder / "damaged", "mimo", depth=1)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 5)
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    jobs = [
        {"model": str(models[family][0]), "prompts": models[family][1], "num_tokens": k, "max_new_tokens": NEW_TOKENS}
        for family, k in CASES
    ]
    unknown = jobs[0] | {"engine_kwargs": {"max_modle_len": 3}}
    done = run_python(HERE / "serve_sglang.py", json.dumps([*jobs, unknown, jobs[0] | {"model": str(damaged)}]))
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(jobs) + 2, done.stderr[-3000:]
    results: dict[Any, Any] = {case: (*models[case[0]], line) for case, line in zip(CASES, lines, strict=False)}
    return results | {"unknown option": lines[-2], "damaged": lines[-1]}


@pytest.mark.parametrize(("family", "num_tokens"), CASES)
def test_tokens_and_counts_equal_the_reference(served, family, num_tokens):
    directory, prompts, result = served[family, num_tokens]
    expected, counts = simulate(follow(Reference.load(directory, family, depth=1), family), prompts, num_tokens)
    assert 0.1 < counts.accepted_per_position[0] / counts.drafts < 0.9  # some right, some wrong
    assert result["tokens"] == expected
    assert result["reasons"] == ["length"]
    assert result["counts"] == [counts.drafts, counts.drafted, list(counts.accepted_per_position)]
    stop = expected[0][5]
    assert result["stopped"] == [expected[0][: expected[0].index(stop) + 1], "stop"]
    too_long, random = result["refused"]
    assert "a prompt has 256 tokens" in too_long
    assert "--temperature 0.5 with speculation: SGLang on a CPU would verify drafts greedily" in random


def swap_halves(reference: Reference) -> None:
    head: Any = reference.heads[0]
    weight = head["projection"].weight
    weight.data = weight.data.roll(weight.shape[1] // 2, dims=1)


def keep_first_embedding(reference: Reference) -> None:
    reference.zeroes_first_embedding = not reference.zeroes_first_embedding


def take_the_other_state(reference: Reference) -> None:
    reference.takes_state_before_norm = not reference.takes_state_before_norm


@pytest.mark.parametrize("change", [swap_halves, keep_first_embedding, take_the_other_state])
@pytest.mark.parametrize("case", CASES)
def test_another_convention_counts_otherwise(served, case, change):
    """Of each line of the table, each word matters to what is compared."""
    directory, prompts, result = served[case]
    reference = follow(Reference.load(directory, case[0], depth=1), case[0])
    change(reference)
    expected, counts = simulate(reference, prompts, case[1])
    assert result["tokens"] == expected
    assert result["counts"] != [counts.drafts, counts.drafted, list(counts.accepted_per_position)]


def test_what_sglang_refuses_is_told(served):
    """Both before and after its processes were started, and this one lives on."""
    (unknown,) = served["unknown option"]["refused"]
    assert "SGLang refuses its options: Unexpected keyword argument 'max_modle_len'" in unknown
    (damaged,) = served["damaged"]["refused"]
    assert damaged.startswith("SGLang could not start")


def test_infer_compares_with_and_without_speculation(tmp_path):
    """The whole command, on random heads: next to nothing is accepted, and no answer changes."""
    model = make_tiny_hf(tmp_path / "model", "mimo", depth=1, with_tokenizer=True)
    prompts, acceptance = tmp_path / "prompts.jsonl", tmp_path / "acceptance.json"
    questions = ("The quick", "What does it do?", "Sum")
    prompts.write_text("".join(json.dumps({"query": question}) + "\n" for question in questions))
    acceptance.write_text('{"depths": 1}')
    options = "--infer_backend sglang --speculative mtp --compare --max_new_tokens 40 --torch_dtype float32".split()
    files = ["--model", model, "--val_dataset", prompts, "--acceptance_json", acceptance]
    done = run_python("-m", "swiftlite", "infer", *options, *files)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [json.loads(line)["messages"][0]["content"] for line in done.stdout.splitlines()] == list(questions)
    assert "answers equal: 3 of 3" in done.stderr
    counted = json.loads(acceptance.read_text())["engines"]["sglang"]
    assert counted["drafted"] > 60
    assert counted["acceptance_rate"] < 0.2


def test_the_printed_command_starts_the_server(tmp_path):
    """As pasted into a shell; it answers an OpenAI client, drafting."""
    model = make_tiny_hf(tmp_path / "model", "mimo", depth=1, with_tokenizer=True)
    url = "http://127.0.0.1:8139"
    options = f"--model {model} --torch_dtype float32 --port 8139 --max_model_len 256 --infer_backend sglang --dry_run"
    small = '{"max_total_tokens": 4096, "max_running_requests": 4, "enable_metrics": true}'
    printed = run_python("-m", "swiftlite", "deploy", *options.split(), "--sglang_engine_kwargs", small)
    (line,) = printed.stdout.splitlines()
    assert "--speculative-algorithm NEXTN --speculative-num-steps 1" in line
    log = tmp_path / "log"
    with log.open("w") as stream:
        command = ["bash", "-c", f"exec env {line}"]
        server = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=sglang_environment())
    try:
        answer = wait_for(server, url, log)
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            metrics = response.read().decode()
    finally:
        server.terminate()
        server.wait(timeout=60)
    assert answer.usage.completion_tokens == 20
    assert "sglang:spec_accept_length" in metrics


def wait_for(server: subprocess.Popen, url: str, log: Path) -> Any:
    """The server's answer to a first question, once it is up."""
    from openai import APIConnectionError, InternalServerError, OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            question: Any = {"role": "user", "content": "The quick"}
            return client.chat.completions.create(
                model="default", messages=[question], max_tokens=20, extra_body={"ignore_eos": True}
            )
        except (APIConnectionError, InternalServerError):
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])
