"""Test what is found near the path that a user gives."""

import json
from pathlib import Path

import pytest

from swiftlite.plan.facts import config_directory, model_of_run, near_path, read_hf_config, run_checkpoints
from tests.messages import mentions


@pytest.fixture
def run(tmp_path) -> Path:
    """Write a run with two checkpoints, and the model that it started from."""
    for folder in ("model", "run/source", "run/checkpoint-5", "run/checkpoint-20", "run/checkpoint-tmp"):
        (tmp_path / folder).mkdir(parents=True)
    for directory in ("model", "run/source"):
        (tmp_path / directory / "config.json").write_text('{"num_nextn_predict_layers": 2}')
    (tmp_path / "run/args.json").write_text(json.dumps({"model": str(tmp_path / "model")}))
    return tmp_path / "run"


def test_checkpoints_are_in_the_order_of_their_steps(run):
    (run / "checkpoint-100").write_text("no directory")
    assert [path.name for path in run_checkpoints(run)] == ["checkpoint-5", "checkpoint-20"]
    assert run_checkpoints(run / "nowhere") == []


def test_a_run_and_its_checkpoints_keep_config_json_in_source(run):
    assert config_directory(run) == run / "source"
    assert config_directory(run / "checkpoint-5") == run / "source"
    assert config_directory(run.parent / "model") == run.parent / "model"
    assert config_directory(run.parent) == run.parent


def test_the_model_that_a_run_began_with(run):
    model = run.parent / "model"
    assert model_of_run(run) == str(model)
    assert model_of_run(run / "checkpoint-20") == str(model)
    (model / "config.json").unlink()
    assert model_of_run(run) is None
    assert model_of_run(model) is None


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_a_config_json_that_cannot_be_read_is_empty(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert read_hf_config(tmp_path) == {}


def test_near_paths(run):
    assert mentions(near_path(run.parent / "modle"), f"{run.parent / 'model'}")
    assert near_path(run.parent / "xyz") == ""
    (run.parent / "ok.jsonl").touch()
    assert near_path(run.parent / "nosuch.jsonl") == ""  # the ending alone is no likeness
    assert mentions(near_path(run.parent / "okk.jsonl"), f"{run.parent / 'ok.jsonl'}")
    assert mentions(near_path(run.parent / "no" / "such"), f"{run.parent / 'no'}")
