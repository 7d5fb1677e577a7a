"""Test the rules of `regenerate`."""

import dataclasses

import pytest

from swiftlite import rules
from tests.messages import mention_each, mentions
from tests.rules.good import REGENERATE, problems_of


def test_good_options_pass_without_a_note(here):
    assert rules.check(REGENERATE) == []
    assert rules.check(dataclasses.replace(REGENERATE, model="plain", num_answers=3, temperature=0.7, top_p=0.9)) == []
    self_prompts = {"self_prompts": 10, "self_turns": 2, "max_prompt_tokens": 64, "topics": "train.jsonl"}
    assert rules.check(dataclasses.replace(REGENERATE, dataset=[], **self_prompts)) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"model": "run"}, "--model run", "export --to_hf"),
        ({"dataset": []}, "--dataset --self_prompts", "--self_prompts 1000"),
        ({"self_prompts": -1}, "--self_prompts -1 0", ""),
        ({"self_turns": 2}, "--self_turns --self_prompts", "--self_prompts 1000"),
        ({"topics": "train.jsonl"}, "--topics --self_prompts", "--self_prompts 1000"),
        ({"openings": "builtin"}, "--openings --self_prompts", "--self_prompts 1000"),
        ({"self_prompts": 9, "openings_share": 0.5}, "--openings_share --openings", "--openings builtin"),
        ({"self_prompts": 9, "openings": "builtin", "openings_share": 0.0}, "--openings_share 0.0 0", ""),
        ({"max_prompt_tokens": 64}, "--max_prompt_tokens --self_prompts", "--self_prompts 1000"),
        ({"dataset": ["trian.jsonl"]}, "--dataset trian.jsonl", "train.jsonl"),
        ({"output_dir": ""}, "--output_dir", ""),
        ({"output_dir": "val.jsonl"}, "--output_dir val.jsonl", ""),
        ({"output_dir": "."}, "--dataset train.jsonl --output_dir", ""),
        ({"output_dir": ".", "dataset": ["val.jsonl#1"]}, "--dataset val.jsonl#1 --output_dir", ""),
        ({"num_answers": 2}, "--num_answers 2 --temperature 0", "--temperature 0.7"),
        ({"num_answers": 0}, "--num_answers 0 1", ""),
        ({"gold_fraction": 1.0}, "--gold_fraction 1.0 0 1", ""),
        ({"max_bad_rows": -1}, "--max_bad_rows -1 0", ""),
        ({"model": "plain", "speculative": "mtp"}, "plain/config.json", "megatron sft"),
        ({"num_speculative_tokens": 2}, "--num_speculative_tokens 2", "--speculative mtp"),
        ({"vllm_engine_kwargs": {}}, "--vllm_engine_kwargs --infer_backend transformers", "vllm"),
    ],
)
def test_regenerate(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(REGENERATE, **change))
    assert len(problems) == 1
    assert mentions(problems[0][0], problem)
    assert mentions(problems[0][1], hint)


@pytest.mark.parametrize(
    ("change", "note"),
    [({"max_batch_size": 4}, "--max_batch_size 4 transformers"), ({"top_p": 0.5}, "--top_p 0.5 --temperature 0")],
)
def test_a_setting_without_effect_is_noted(here, change, note):
    assert mention_each(rules.check(dataclasses.replace(REGENERATE, **change)), [note])
