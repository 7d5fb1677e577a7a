"""Test the rules of `infer`."""

import dataclasses
import sys
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import InferArgs
from swiftlite.engines.info import EngineInfo
from tests.messages import mention_each, mentions
from tests.rules.good import CHAIN, INFER, problems_of


@pytest.mark.parametrize("args", [INFER, dataclasses.replace(INFER, speculative="none"), InferArgs(model="plain")])
def test_good_options_pass_without_a_note(here, args):
    assert rules.check(args) == []


def test_drafts_from_the_text_need_no_heads(here, monkeypatch):
    monkeypatch.setattr(EngineInfo, "is_installed", property(lambda info: True))
    assert rules.check(dataclasses.replace(INFER, model="plain", infer_backend="llamacpp", speculative="ngram")) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"model": "run"}, "--model run", "export --to_hf"),
        ({"model": "plain"}, "--speculative mtp plain/config.json", "megatron sft"),
        ({"val_dataset": ["vall.jsonl"]}, "--val_dataset vall.jsonl", "val.jsonl"),
        ({"speculative": "none", "num_speculative_tokens": 2}, "--num_speculative_tokens 2", "--speculative mtp"),
        ({"speculative": "none", "draft_confidence": 0.5}, "--draft_confidence 0.5", "--speculative mtp"),
        ({"speculative": "none", "compare": True}, "--compare", "--speculative mtp"),
        ({"compare": True, "val_dataset": []}, "--compare", "--val_dataset FILE"),
        ({"num_speculative_tokens": 0}, "--num_speculative_tokens 0 1", ""),
        ({"top_p": 0.0}, "--top_p 0.0 0 1", ""),
        ({"vllm_engine_kwargs": {"a": 1}}, "--vllm_engine_kwargs --infer_backend transformers", "--infer_backend vllm"),
        (
            {"vllm_speculative_config": {}},
            "--vllm_speculative_config --infer_backend transformers",
            "--infer_backend vllm",
        ),
        ({"sglang_engine_kwargs": {}}, "--sglang_engine_kwargs --infer_backend transformers", "sglang"),
        ({"acceptance_json": "no.json"}, "--acceptance_json no.json", "acceptance.json"),
        ({"speculative": "ngram"}, "--speculative ngram --infer_backend transformers", "--infer_backend llamacpp"),
        ({"stop_strings": ["a", ""]}, "--stop_strings", ""),
        ({"min_p": 1.5}, "--min_p 1.5 0 1", ""),
        ({"repetition_penalty": 0.0}, "--repetition_penalty 0.0 0 2", ""),
    ],
)
def test_infer(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(INFER, **change))
    assert len(problems) == 1
    assert mentions(problems[0][0], problem)
    assert mentions(problems[0][1], hint)


def test_infer_acceptance_json_needs_speculation_and_prompts(here):
    Path("acceptance.json").write_text("{}")
    problems = problems_of(InferArgs(model="plain", acceptance_json="acceptance.json"))
    assert mention_each([hint for _, hint in problems], ["--speculative mtp", "--val_dataset FILE"])


def test_infer_with_vllm_needs_vllm(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # what Python itself calls a module that cannot be imported
    ((problem, hint),) = problems_of(dataclasses.replace(INFER, infer_backend="vllm"))
    assert mentions(problem, "--infer_backend vllm")
    assert mentions(hint, "pip install vllm")


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        (
            {"sglang_speculative_algorithm": "EAGLE", "speculative": "none"},
            "--sglang_speculative_algorithm EAGLE",
            "--speculative mtp",
        ),
        (
            {"sglang_speculative_num_steps": 2},
            "--sglang_speculative_num_steps 2 --sglang_speculative_eagle_topk --sglang_speculative_num_draft_tokens",
            "",
        ),
        (
            CHAIN | {"sglang_speculative_num_draft_tokens": 4},
            "--sglang_speculative_num_draft_tokens 4 2 1",
            "--sglang_speculative_num_draft_tokens 3",
        ),
    ],
)
def test_infer_with_sglang(here, monkeypatch, change, problem, hint):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert mentions(problems_of(dataclasses.replace(INFER, infer_backend="sglang"))[0][1], "pip install sglang")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    ((found, advice),) = problems_of(dataclasses.replace(INFER, infer_backend="sglang", **change))
    assert mentions(found, problem)
    assert mentions(advice, hint)


@pytest.mark.parametrize(
    ("backend", "change", "problem", "hint"),
    [
        ("vllm", {"min_p": 0.1}, "--min_p 0.1 --infer_backend vllm", "--speculative none"),
        ("sglang", {"min_p": 0.1}, "--min_p 0.1 --infer_backend sglang", "--speculative none"),
        ("sglang", {"stop_strings": ["a"]}, "--stop_strings a --infer_backend sglang", "transformers vllm"),
        ("llamacpp", {"stop_strings": ["a"]}, "--stop_strings a --infer_backend llamacpp", "transformers vllm"),
    ],
)
def test_sampling_options_that_an_engine_does_not_have(here, monkeypatch, backend, change, problem, hint):
    monkeypatch.setattr(EngineInfo, "is_installed", property(lambda info: True))
    args = dataclasses.replace(INFER, infer_backend=backend)
    ((found, advice),) = problems_of(dataclasses.replace(args, **change))
    assert mentions(found, problem)
    assert mentions(advice, hint)
    rules.check(dataclasses.replace(args, top_p=0.9, top_k=7, temperature=1.0))


def test_infer_two_answers_for_the_draft_length(here):
    args = dataclasses.replace(
        INFER, infer_backend="vllm", num_speculative_tokens=1, vllm_speculative_config={"num_speculative_tokens": 2}
    )
    assert mentions(problems_of(args)[0][0], "--num_speculative_tokens --vllm_speculative_config")


@pytest.mark.parametrize(
    ("args", "note"),
    [
        (dataclasses.replace(INFER, max_batch_size=4), "--max_batch_size 4 transformers"),
        (
            dataclasses.replace(INFER, max_model_len=513),
            "--max_model_len 513 max_position_embeddings 512 mtp2/config.json",
        ),
        (dataclasses.replace(INFER, top_p=0.5), "--top_p 0.5 --temperature 0"),
        (InferArgs(model="plain", max_pixels=640), "--max_pixels 640 chat"),
    ],
)
def test_a_setting_without_effect_is_noted(here, args, note):
    assert any(mentions(found, note) for found in rules.check(args))


def test_adapters_are_named(here):
    ((problem, hint),) = problems_of(dataclasses.replace(INFER, adapters="plain"))
    assert mentions(problem, "--adapters plain adapter_config.json")
    assert mentions(hint, "export --to_hf --merge_lora false")
