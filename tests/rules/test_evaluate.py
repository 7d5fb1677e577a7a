"""Test the rules of `evaluate`."""

import dataclasses
import shlex
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import EvaluateArgs
from tests.messages import mentions
from tests.rules.good import problems_of

EVALUATE = EvaluateArgs(model="mtp2", dataset=["val.jsonl"], output_dir="out")


def test_good_options_pass_without_a_note(here):
    assert rules.check(EVALUATE) == []
    assert rules.check(dataclasses.replace(EVALUATE, baseline="plain", infer_backend="transformers")) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"dataset": []}, "--dataset", ""),
        ({"dataset": ["vla.jsonl"]}, "--dataset vla.jsonl", "val.jsonl"),
        ({"model": "plain"}, "plain/config.json", ""),
        ({"baseline": "nowhere"}, "--baseline nowhere config.json", ""),
        (
            {"model": "features", "infer_backend": "sglang"},
            "--infer_backend sglang mtp_features",
            "--infer_backend vllm",
        ),
        ({"output_dir": ""}, "--output_dir", "--output_dir evaluation"),
        ({"output_dir": "val.jsonl"}, "--output_dir val.jsonl", ""),
        ({"draft_confidence": [0.5]}, "--draft_confidence 0.5 --infer_backend none", "--infer_backend transformers"),
        ({"draft_confidence": [0.5, 2.0], "infer_backend": "transformers"}, "--draft_confidence 2", ""),
        ({"max_prompts": 0}, "--max_prompts 0 1", ""),
        ({"acceptance_json": "val.jsonl"}, "--acceptance_json --infer_backend", "--infer_backend vllm"),
        (
            {"acceptance_json": "no.json", "infer_backend": "transformers"},
            "--acceptance_json no.json",
            "acceptance.json",
        ),
    ],
)
def test_evaluate(here, change, problem, hint):
    ((found, advice),) = problems_of(dataclasses.replace(EVALUATE, **change))
    assert mentions(found, problem)
    assert mentions(advice, hint)


def test_an_engine_is_installed(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ((problem, _),) = problems_of(dataclasses.replace(EVALUATE, infer_backend="vllm"))
    assert mentions(problem, "--infer_backend vllm")


SERVER = EvaluateArgs(server="http://127.0.0.1:8000", output_dir="out")


@pytest.mark.parametrize("server", ["http://127.0.0.1:8000/", "https://serving.example/vllm", "http://[::1]:8000"])
def test_a_server_needs_no_model(here, server):
    assert rules.check(dataclasses.replace(SERVER, server=server)) == []
    assert rules.check(dataclasses.replace(SERVER, server=server, since="24h")) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"output_dir": ""}, "--output_dir", "--output_dir"),
        ({"model": "mtp2"}, "--model --server", "--model"),
        ({"dataset": ["val.jsonl"]}, "--dataset --server", "--dataset"),
        ({"baseline": "mtp2"}, "--baseline --server", "--baseline"),
        ({"infer_backend": "vllm"}, "--infer_backend --server", "--infer_backend"),
        ({"num_speculative_tokens": 2}, "--num_speculative_tokens --server", "--num_speculative_tokens"),
        ({"draft_confidence": [0.5]}, "--draft_confidence --server", "--draft_confidence"),
        ({"since": "yesterday"}, "--since yesterday", "--since 24h"),
        ({"since": "0h"}, "--since 0h", "--since 24h"),
        *(
            ({"server": server}, f"--server {server}", "http://127.0.0.1:8000")
            for server in ("127.0.0.1:8000", "localhost", "http://", "http://a:b", "http://user:word@a", "ftp://a", "")
        ),
    ],
)
def test_evaluate_server(here, change, problem, hint):
    ((found, advice),) = problems_of(dataclasses.replace(SERVER, **change))
    assert mentions(found, problem)
    assert mentions(advice, hint)


def test_since_requires_a_server(here):
    ((problem, hint),) = problems_of(dataclasses.replace(EVALUATE, since="24h"))
    assert mentions(problem, "--since --server")
    assert mentions(hint, "--server --since")


OF_AN_ENGINE = {"max_prompts": 3, "max_new_tokens": 7, "temperature": 0.5, "num_speculative_tokens": 1}


def flags(notes: list[str]) -> set[str]:
    return {note.split()[0].removeprefix("--") for note in notes if mentions(note, "--infer_backend none")}


@pytest.mark.parametrize("name", OF_AN_ENGINE)
def test_what_an_engine_would_do_has_no_effect_without_one(here, name):
    assert flags(rules.check(dataclasses.replace(EVALUATE, **{name: OF_AN_ENGINE[name]}))) == {name}


def test_all_that_an_engine_would_do_is_named(here):
    assert flags(rules.check(dataclasses.replace(EVALUATE, **OF_AN_ENGINE))) == OF_AN_ENGINE.keys()
    assert rules.check(dataclasses.replace(EVALUATE, **OF_AN_ENGINE, infer_backend="transformers")) == []


TASKS = EvaluateArgs(model="mtp2", tasks=["gsm8k"], output_dir="out", infer_backend="transformers")


@pytest.fixture
def with_lm_eval(tmp_path, monkeypatch):
    """Have an environment that looks as if it contained lm-evaluation-harness."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    (venv / "lib/python3.11/site-packages/lm_eval-0.4.13.dist-info").mkdir(parents=True)
    monkeypatch.setenv("SWIFTLITE_LM_EVAL_VENV", str(venv))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model": "plain"},
        {"baseline": "plain", "compare": True, "num_fewshot": 0, "limit": 0.5, "max_length": 512},
        {"infer_backend": "none", "server": "http://127.0.0.1:8000"},
    ],
)
def test_good_tasks_pass_without_a_note(here, with_lm_eval, change):
    assert rules.check(dataclasses.replace(TASKS, **change)) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"model": None}, "--model", ""),
        ({"tasks": ["./gsm8k"]}, "--tasks ./gsm8k", "--include_path"),
        ({"tasks": ["task.yaml"]}, "--tasks task.yaml", "--include_path"),
        ({"tasks": ["--help"]}, "--tasks --help", "--include_path"),
        ({"include_path": "nowhere"}, "--include_path nowhere", ""),
        ({"infer_backend": "llamacpp"}, "--tasks --infer_backend llamacpp", "transformers vllm"),
        ({"infer_backend": "sglang"}, "--tasks --infer_backend sglang", "transformers vllm"),
        ({"dataset": ["val.jsonl"]}, "--dataset --tasks", ""),
        ({"temperature": 0.5}, "--temperature --tasks", ""),
        ({"model": "plain", "compare": True}, "--compare plain/config.json", ""),
        ({"limit": 0}, "--limit 0", ""),
        (
            {"infer_backend": "none", "server": "http://127.0.0.1:8000", "baseline": "plain"},
            "--baseline --tasks --server",
            "",
        ),
        ({"tasks": [], "dataset": ["val.jsonl"], "compare": True}, "--compare --tasks", "--tasks --compare"),
    ],
)
def test_options_of_tasks(here, with_lm_eval, change, problem, hint):
    ((found, advice),) = problems_of(dataclasses.replace(TASKS, **change))
    assert mentions(found, problem)
    assert mentions(advice, hint)


def test_the_command_that_installs_lm_eval_is_printed(here, tmp_path, monkeypatch):
    """requirements/lm_eval.txt has the release of the command."""
    venv = tmp_path / "with space" / "venv"
    monkeypatch.setenv("SWIFTLITE_LM_EVAL_VENV", str(venv))
    ((problem, hint),) = problems_of(TASKS)
    assert mentions(problem, "--tasks")
    words = shlex.split(hint)
    assert words[1:4] == ["-m", "venv", str(venv)]
    requirements = Path(__file__).parents[2] / "requirements" / "lm_eval.txt"
    assert words[-2] in requirements.read_text().split()
    assert words[-4:-2] == [str(venv / "bin" / "pip"), "install"]
