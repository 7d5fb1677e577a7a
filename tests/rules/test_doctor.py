"""Test the rules of `doctor`."""

import pytest

from swiftlite import rules
from swiftlite.args.commands import DoctorArgs
from tests.messages import mention_each, mentions
from tests.rules.good import problems_of


@pytest.mark.parametrize("args", [DoctorArgs(), DoctorArgs(model="plain")])
def test_good_options_pass_without_a_note(here, args):
    assert rules.check(args) == []


def test_doctor(here):
    assert mention_each(problems_of(DoctorArgs(model="plian")), ["--model plian plain"])
    assert mention_each(problems_of(DoctorArgs(model="train.jsonl")), ["--model train.jsonl"])


@pytest.mark.parametrize(
    ("args", "problem", "hint"),
    [
        (DoctorArgs(engine="sglang"), "--engine sglang", "--model DIRECTORY"),
        (DoctorArgs(num_speculative_tokens=2), "--num_speculative_tokens 2", "--engine vllm"),
        (DoctorArgs(torch_dtype="float32"), "--torch_dtype float32", "--engine vllm"),
        (
            DoctorArgs(engine="sglang", model="plain", vllm_engine_kwargs={}),
            "--vllm_engine_kwargs {} --engine sglang",
            "--engine vllm",
        ),
    ],
)
def test_doctor_of_an_engine(here, args, problem, hint):
    ((found, advice),) = problems_of(args)
    assert mentions(found, problem)
    assert mentions(advice, hint)


def test_doctor_of_vllm_needs_vllm(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ((problem, _),) = problems_of(DoctorArgs(model="plain", engine="vllm"))
    assert mentions(problem, "--engine vllm")
