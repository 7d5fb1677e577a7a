"""Test the rules of `evaluate`."""

import dataclasses

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
        ({"output_dir": ""}, "--output_dir", "--output_dir evaluation"),
        ({"output_dir": "val.jsonl"}, "--output_dir val.jsonl", ""),
        ({"draft_confidence": [0.5]}, "--draft_confidence 0.5 --infer_backend none", "--infer_backend transformers"),
        (
            {"draft_confidence": [0.5, 2.0], "infer_backend": "transformers"},
            "--draft_confidence 2",
            "",
        ),
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
