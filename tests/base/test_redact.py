"""Test which options and texts are secret by their names."""

import json
import shlex

import pytest

from swiftlite.base import redact as module
from swiftlite.base.redact import redact, redact_text, remember

KWARGS = {"api_key": ["SECRET1", "SECRET2"], "hf_token": "SECRET3", "max_tokens": 5, "inner": {"password": "SECRET4"}}


def test_options():
    shown = redact({"vllm_engine_kwargs": KWARGS, "stop_token_ids": [1], "hf_token": True, "api_key": None})
    assert shown == {
        "vllm_engine_kwargs": {"api_key": "***", "hf_token": "***", "max_tokens": 5, "inner": {"password": "***"}},
        "stop_token_ids": [1],
        "hf_token": True,
        "api_key": None,
    }


@pytest.mark.parametrize(
    "line",
    [
        shlex.join(["--vllm_engine_kwargs", json.dumps(KWARGS)]),
        str(KWARGS),
        json.dumps(KWARGS)[:-1],  # what JSON cannot be read from
        json.dumps({"api_key": 'SECRET " SECRET'}),
        "--api-key SECRET --max-tokens 5",
        "--api-key=SECRET --max-tokens 5",
        "VLLM_API_KEY=x,SECRET python",
        "VLLM_API_KEY=x}SECRET python",
        json.dumps({"api_key": ["x]", "SECRET"]}),
        "{'api_key': ['x', 'SECRET..., input_type=dict]",  # shortened
        shlex.join(["--api-key", "SECRET SECRET"]),
        shlex.join(["--api-key", "SECRET'SECRET"]),
        "{api_key:SECRET}",
        "{max_tokens: 5, api_key: SECRET",
        "--secret-access-key SECRET",
        "HF_TOKEN=SECRET VLLM_API_KEY='SECRET x' python",
        "Input should be a string [input_value={'hf-token': 'SECRET'}]",
    ],
)
def test_lines(line):
    assert "SECRET" not in redact_text(line)
    assert "***" in redact_text(line)


@pytest.mark.parametrize(
    "line",
    [
        "--num_speculative_tokens 3 --max_new_tokens 5",
        "the tokenizer has no eos token: 5 rows",
        '{"stop_token_ids": [1], "max_tokens": 3}',
        '{"use_auth_token": true, "api_key": null}',
        "acceptance on --val_dataset: 5.0 %",
        "--api-key\n  is unknown",
        "no end token: 5",
    ],
)
def test_lines_without_a_secret_are_left(line):
    assert redact_text(line) == line


@pytest.mark.parametrize("key", ["FIRST,SECOND", "FIRST SECOND", "FIRST}SECOND", "FIRST'SECOND\"", "FIRST\\ü\nSECOND"])
def test_remembered_values_are_hidden_in_any_text(monkeypatch, key):
    monkeypatch.setattr(module, "_known", set())
    remember({"vllm_engine_kwargs": {"api_key": ["other", key]}, "hf_token": 12345, "max_tokens": 77777})
    options = {"key": key}
    lines = [key, json.dumps(options), json.dumps(options, ensure_ascii=False), str(options)]
    for line in [*lines, *map(shlex.quote, lines)]:
        shown = redact_text(f"the server printed: {line} other 12345 77777")
        assert "FIRST" not in shown
        assert "SECOND" not in shown
        assert shown.endswith(" *** *** 77777")


def test_short_values_are_hidden_only_behind_their_names(monkeypatch):
    monkeypatch.setattr(module, "_known", set())
    remember({"api_key": 5})
    assert redact_text("5 rows, --api-key 5") == "5 rows, --api-key ***"
