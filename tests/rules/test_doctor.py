"""Rules of `doctor`."""

import pytest

from swiftlite import rules
from swiftlite.args.commands import DoctorArgs
from tests.rules.good import problems_of


@pytest.mark.parametrize(
    "args",
    [
        DoctorArgs(),
        DoctorArgs(model="plain"),
    ],
)
def test_good_options_pass_without_a_note(here, args):
    assert rules.check(args) == []


def test_doctor(here):
    assert problems_of(DoctorArgs(model="plian")) == [("--model plian is no directory", "did you mean plain?")]
    assert problems_of(DoctorArgs(model="train.jsonl")) == [
        ("--model train.jsonl is no directory", "give the directory of a Hugging Face model")
    ]


@pytest.mark.parametrize(
    ("args", "problem", "hint"),
    [
        (DoctorArgs(engine="sglang"), "--engine sglang needs a model", "add --model DIRECTORY"),
        (DoctorArgs(engine="sglang", model="plain", plan=True), "--engine and --plan are two", "ask one at a time"),
        (DoctorArgs(num_speculative_tokens=2), "--num_speculative_tokens 2 without an engine", "add --engine vllm"),
        (DoctorArgs(torch_dtype="float32"), "--torch_dtype float32 without an engine", "add --engine vllm"),
        (
            DoctorArgs(engine="sglang", model="plain", vllm_engine_kwargs={}),
            "--vllm_engine_kwargs {} with --engine sglang",
            "it is for --engine vllm",
        ),
    ],
)
def test_doctor_of_an_engine(here, args, problem, hint):
    ((found, advice),) = problems_of(args)
    assert found.startswith(problem)
    assert advice.startswith(hint)


def test_options_of_adapters_have_adapters(here):
    ((problem, hint),) = problems_of(DoctorArgs(model="plain", plan=True, lora_rank=4, use_dora=True))
    assert problem == "--lora_rank, --use_dora without adapters: --tuner_type is full"
    assert hint == "add --tuner_type lora"


def test_doctor_of_vllm_needs_vllm(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ((problem, _),) = problems_of(DoctorArgs(model="plain", engine="vllm"))
    assert problem == "--engine vllm, but it is not installed"
