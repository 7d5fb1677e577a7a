"""Rules of `infer`."""

import dataclasses
import sys
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import InferArgs
from tests.rules.good import CHAIN, INFER, problems_of


@pytest.mark.parametrize(
    "args",
    [
        INFER,
        dataclasses.replace(INFER, speculative="none"),
        InferArgs(model="plain"),
    ],
)
def test_good_options_pass_without_a_note(here, args):
    assert rules.check(args) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"model": "run"}, "holds megatron-core checkpoints", "export --to_hf"),
        ({"model": "plain"}, "--speculative mtp, but plain/config.json promises no MTP layer", "megatron sft"),
        ({"val_dataset": ["vall.jsonl"]}, "--val_dataset vall.jsonl does not exist", "did you mean val.jsonl?"),
        (
            {"speculative": "none", "num_speculative_tokens": 2},
            "--num_speculative_tokens 2 without speculation",
            "add --speculative mtp",
        ),
        (
            {"speculative": "none", "draft_confidence": 0.5},
            "--draft_confidence 0.5 without speculation",
            "add --speculative mtp",
        ),
        ({"speculative": "none", "compare": True}, "--compare has nothing to compare", "add --speculative mtp"),
        ({"compare": True, "val_dataset": []}, "a chat on stdin has none to repeat", "add --val_dataset FILE"),
        ({"num_speculative_tokens": 0}, "--num_speculative_tokens 0 must be at least 1", ""),
        ({"top_p": 0.0}, "--top_p 0.0 must be above 0 and at most 1", ""),
        (
            {"vllm_engine_kwargs": {"a": 1}},
            "--vllm_engine_kwargs with --infer_backend transformers",
            "add --infer_backend vllm",
        ),
        (
            {"vllm_speculative_config": {}},
            "--vllm_speculative_config with --infer_backend transformers",
            "add --infer_backend vllm",
        ),
        ({"sglang_engine_kwargs": {}}, "--sglang_engine_kwargs with --infer_backend transformers", "backend sglang"),
        ({"acceptance_json": "no.json"}, "--acceptance_json no.json does not exist", "acceptance.json of an sft run"),
    ],
)
def test_infer(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(INFER, **change))
    assert len(problems) == 1
    assert problem in problems[0][0]
    assert hint in problems[0][1]


def test_infer_acceptance_json_needs_speculation_and_prompts(here):
    Path("acceptance.json").write_text("{}")
    problems = problems_of(InferArgs(model="plain", acceptance_json="acceptance.json"))
    assert [hint for _, hint in problems] == ["add --speculative mtp", "add --val_dataset FILE"]


def test_infer_with_vllm_needs_vllm(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # what Python itself calls a module that cannot be imported
    ((problem, hint),) = problems_of(dataclasses.replace(INFER, infer_backend="vllm"))
    assert problem == "--infer_backend vllm, but it is not installed"
    assert "pip install vllm" in hint


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        (
            {"sglang_speculative_algorithm": "EAGLE", "speculative": "none"},
            "--sglang_speculative_algorithm EAGLE without speculation",
            "add --speculative mtp",
        ),
        (
            {"sglang_speculative_num_steps": 2},
            "2 without --sglang_speculative_eagle_topk and --sglang_spec",
            "give all three, or none",
        ),
        (
            CHAIN | {"sglang_speculative_num_draft_tokens": 4},
            "--sglang_speculative_num_draft_tokens 4 with 2 steps of topk 1",
            "--sglang_speculative_num_draft_tokens 3",
        ),
    ],
)
def test_infer_with_sglang(here, monkeypatch, change, problem, hint):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert problems_of(dataclasses.replace(INFER, infer_backend="sglang"))[0][1].startswith("pip install sglang")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    ((found, advice),) = problems_of(dataclasses.replace(INFER, infer_backend="sglang", **change))
    assert problem in found
    assert hint in advice


def test_infer_two_answers_for_the_draft_length(here):
    args = dataclasses.replace(
        INFER, infer_backend="vllm", num_speculative_tokens=1, vllm_speculative_config={"num_speculative_tokens": 2}
    )
    assert "--num_speculative_tokens and --vllm_speculative_config both say" in problems_of(args)[0][0]


@pytest.mark.parametrize(
    ("args", "note"),
    [
        (
            dataclasses.replace(INFER, max_batch_size=4),
            "--max_batch_size 4 has no effect: transformers answers one prompt at a time",
        ),
        (
            dataclasses.replace(INFER, max_model_len=513),
            "--max_model_len 513 is beyond what the model was made for: max_position_embeddings 512 in "
            "mtp2/config.json",
        ),
        (dataclasses.replace(INFER, top_p=0.5), "--top_p 0.5 has no effect: --temperature 0 is greedy"),
    ],
)
def test_a_setting_without_effect_is_noted(here, args, note):
    assert note in rules.check(args)


def test_adapters_are_named(here):
    ((problem, hint),) = problems_of(dataclasses.replace(INFER, adapters="plain"))
    assert (problem, hint) == (
        "--adapters plain has no adapter_config.json",
        "give what export --to_hf --merge_lora false has written",
    )
