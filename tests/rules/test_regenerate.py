"""Rules of `regenerate`."""

import dataclasses

import pytest

from swiftlite import rules
from tests.rules.good import REGENERATE, problems_of


def test_good_options_pass_without_a_note(here):
    assert rules.check(REGENERATE) == []
    assert rules.check(dataclasses.replace(REGENERATE, model="plain", num_answers=3, temperature=0.7, top_p=0.9)) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"model": "run"}, "holds megatron-core checkpoints", "export --to_hf"),
        ({"dataset": []}, "--dataset is required", "--dataset train.jsonl"),
        ({"dataset": ["trian.jsonl"]}, "--dataset trian.jsonl does not exist", "did you mean train.jsonl?"),
        ({"output_dir": ""}, "--output_dir is required", "name the directory to write"),
        ({"output_dir": "val.jsonl"}, "--output_dir val.jsonl is a file", "name a directory"),
        ({"output_dir": "."}, "--dataset train.jsonl is in --output_dir .", "name another directory"),
        ({"output_dir": ".", "dataset": ["val.jsonl#1"]}, "--dataset val.jsonl#1 is in --output_dir", "another"),
        ({"num_answers": 2}, "--num_answers 2 with --temperature 0", "add --temperature 0.7"),
        ({"num_answers": 0}, "--num_answers 0 must be at least 1", ""),
        ({"gold_fraction": 1.0}, "--gold_fraction 1.0 must be at least 0 and below 1", ""),
        ({"max_bad_rows": -1}, "--max_bad_rows -1 must be at least 0", ""),
        ({"model": "plain", "speculative": "mtp"}, "plain/config.json promises no MTP layer", "megatron sft"),
        ({"num_speculative_tokens": 2}, "--num_speculative_tokens 2 without speculation", "add --speculative mtp"),
        ({"vllm_engine_kwargs": {}}, "--vllm_engine_kwargs with --infer_backend transformers", "backend vllm"),
    ],
)
def test_regenerate(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(REGENERATE, **change))
    assert len(problems) == 1
    assert problem in problems[0][0]
    assert hint in problems[0][1]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"max_batch_size": 4}, "--max_batch_size 4 has no effect: transformers answers one prompt at a time"),
        ({"top_p": 0.5}, "--top_p 0.5 has no effect: --temperature 0 is greedy"),
    ],
)
def test_a_setting_without_effect_is_noted(here, change, note):
    assert rules.check(dataclasses.replace(REGENERATE, **change)) == [note]
