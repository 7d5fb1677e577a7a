"""Test the rules of `speedup`, except the rule about the installed engine."""

import dataclasses
from typing import Any

import pytest

from swiftlite.args.commands import SpeedupArgs
from swiftlite.improve.speedup.held_out import MIN_HELD_OUT
from swiftlite.plan.facts import read_facts
from swiftlite.rules import speedup
from swiftlite.rules.engine_options import engine_is_installed
from tests.messages import mentions
from tests.rules.good import change_config
from tests.tiny import make_tiny_hf

GOOD = SpeedupArgs(model="plain", output_dir="out")


def problems_of(args: SpeedupArgs) -> list[Any]:
    facts = read_facts(args, 1)
    problems = []
    for rule in speedup.RULES:
        if rule is not engine_is_installed:
            problems += rule(args, facts)
    return problems


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model": "mtp2"},
        {"budget": "5m"},
        {"dataset": ["train.jsonl#2"]},
        {"drafter": "dspark"},
        {"drafter": "auto"},
    ],
)
def test_good_options_pass(here, change):
    assert problems_of(dataclasses.replace(GOOD, **change)) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"model": "run"}, "--model run", "export --to_hf"),
        ({"output_dir": ""}, "--output_dir", ""),
        ({"budget": "soon"}, "--budget soon", "1h30m"),
        ({"budget": "1s"}, "--budget 1s", "5m"),
        ({"dataset": ["trian.jsonl"]}, "--dataset trian.jsonl", "train.jsonl"),
        ({"dataset": ["train.jsonl"], "output_dir": "."}, "--dataset train.jsonl --output_dir", ""),
        ({"self_prompts_share": 0.2}, "--self_prompts_share --dataset", "--dataset"),
        ({"dataset": ["train.jsonl"], "self_prompts_share": 1.5}, "--self_prompts_share 1.5 0 1", ""),
        ({"max_new_tokens": 0}, "--max_new_tokens 0 1", ""),
        ({"concurrency": [1, 0]}, "--concurrency 1,0", "1,8"),
        ({"concurrency": [4, 4]}, "--concurrency 4,4", "1,8"),
        ({"concurrency": []}, "--concurrency", "1,8"),
        ({"concurrency": [1, 17]}, "--concurrency 1,17 16", "--concurrency 1,16"),
        ({"drafter": "eagle3.1", "infer_backend": "llamacpp"}, "--drafter eagle3.1 llama.cpp", "--drafter mtp"),
        ({"drafter": "dspark", "model": "mtp2"}, "--drafter dspark --model", "--drafter mtp"),
        ({"drafter": "dspark", "model": "block"}, "--model dflash", "sft"),
    ],
)
def test_bad_options_are_named(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(GOOD, **change))
    assert len(problems) == 1
    assert mentions(problems[0][0], problem)
    assert mentions(problems[0][1], hint)


def test_each_concurrent_request_has_a_held_out_prompt():
    assert speedup.MAX_CONCURRENCY == MIN_HELD_OUT


def test_the_engine_runs_the_family(here):
    path = here / "plain" / "config.json"
    path.write_text(path.read_text().replace("qwen3", "exaone4"))
    ((problem, hint),) = problems_of(dataclasses.replace(GOOD, infer_backend="llamacpp"))
    assert mentions(problem, "--infer_backend llamacpp exaone4")
    assert mentions(hint, "--infer_backend transformers vllm")
    assert problems_of(dataclasses.replace(GOOD, infer_backend="vllm")) == []


@pytest.mark.parametrize(("family", "why"), [("gemma4_text", "gemma4"), ("nemotron_h", "experts")])
def test_heads_that_the_engine_would_refuse_after_training(tmp_path, family, why):
    sizes: Any = {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]} if family == "nemotron_h" else {}
    model = make_tiny_hf(tmp_path / "model", family, depth=0, **sizes)
    good = dataclasses.replace(GOOD, model=str(model), output_dir=str(tmp_path / "out"))
    assert problems_of(good) == []
    ((problem, hint),) = problems_of(dataclasses.replace(good, infer_backend="llamacpp"))
    assert mentions(problem, f"--infer_backend llamacpp {why}")
    assert mentions(hint, "--infer_backend vllm")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}, "quantized"),
        ({"model_type": "mistral", "sliding_window": 64}, "vLLM window"),
    ],
)
def test_a_drafter_that_the_engine_would_refuse_after_training(here, change, why):
    change_config(**change)
    ((problem, _),) = problems_of(dataclasses.replace(GOOD, drafter="dspark"))
    assert mentions(problem, f"--drafter dspark {why}")
