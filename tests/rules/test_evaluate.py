"""Rules of `evaluate`."""

import dataclasses

import pytest

from swiftlite import rules
from swiftlite.args.commands import EvaluateArgs
from tests.rules.good import problems_of

EVALUATE = EvaluateArgs(model="mtp2", dataset=["val.jsonl"], output_dir="out")


def test_good_options_pass_without_a_note(here):
    assert rules.check(EVALUATE) == []
    assert rules.check(dataclasses.replace(EVALUATE, baseline="plain", infer_backend="transformers")) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"dataset": []}, "--dataset is required", "that the model was not trained on"),
        ({"dataset": ["vla.jsonl"]}, "--dataset vla.jsonl does not exist", "did you mean val.jsonl?"),
        ({"model": "plain"}, "plain/config.json promises no MTP layer", "train heads first"),
        ({"baseline": "nowhere"}, "--baseline nowhere has no config.json", "a Hugging Face model"),
        ({"output_dir": ""}, "--output_dir is required", "--output_dir evaluation"),
        ({"output_dir": "val.jsonl"}, "--output_dir val.jsonl is a file", "name a directory"),
        ({"draft_confidence": [0.5]}, "--draft_confidence 0.5 with --infer_backend none", "add --infer_backend transf"),
        (
            {"draft_confidence": [0.5, 2.0], "infer_backend": "transformers"},
            "--draft_confidence 2: a probability",
            "",
        ),
        ({"max_prompts": 0}, "--max_prompts 0 must be at least 1", ""),
    ],
)
def test_evaluate(here, change, problem, hint):
    ((found, advice),) = problems_of(dataclasses.replace(EVALUATE, **change))
    assert problem in found
    assert hint in advice


def test_an_engine_is_installed(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ((problem, _),) = problems_of(dataclasses.replace(EVALUATE, infer_backend="vllm"))
    assert problem == "--infer_backend vllm, but it is not installed"


OF_AN_ENGINE = {"max_prompts": 3, "max_new_tokens": 7, "temperature": 0.5, "num_speculative_tokens": 1}


def flags(notes: list[str]) -> set[str]:
    return {note.split()[0].removeprefix("--") for note in notes if "--infer_backend is none" in note}


@pytest.mark.parametrize("name", OF_AN_ENGINE)
def test_what_an_engine_would_do_has_no_effect_without_one(here, name):
    assert flags(rules.check(dataclasses.replace(EVALUATE, **{name: OF_AN_ENGINE[name]}))) == {name}


def test_all_that_an_engine_would_do_is_named(here):
    assert flags(rules.check(dataclasses.replace(EVALUATE, **OF_AN_ENGINE))) == OF_AN_ENGINE.keys()
    assert rules.check(dataclasses.replace(EVALUATE, **OF_AN_ENGINE, infer_backend="transformers")) == []
