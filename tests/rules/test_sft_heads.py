"""Test the rules of MTP heads."""

import dataclasses
import json
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import GkdArgs, PlanArgs, PlannedRun
from swiftlite.families.drafters import BLOCKS
from swiftlite.families.serving.index import DRAFT_FOR
from tests.messages import mention_each, mentions
from tests.plan.test_memory import CONFIGS
from tests.published.library import content as published
from tests.rules.good import SFT, change_config, problems_of


@pytest.mark.parametrize(
    "args",
    [
        dataclasses.replace(SFT, mtp_num_layers=1, mtp_init="copy_last_layer"),
        dataclasses.replace(SFT, model="mtp2"),
        dataclasses.replace(SFT, mtp_num_layers=1, mtp_init="random", mtp_unroll=3, mtp_loss="kl"),
        dataclasses.replace(SFT, model="vocab", mtp_mode="heads_only", mtp_unroll=2, mtp_unroll_weights="joint"),
        dataclasses.replace(SFT, mtp_num_layers=2, mtp_init="graft", mtp_graft_from="mtp2"),
        dataclasses.replace(SFT, model="mtp2", mtp_num_layers=2, mtp_mode="heads_only"),
        dataclasses.replace(SFT, model="mtp2", mtp_num_layers=1, mtp_init="random"),
        dataclasses.replace(SFT, model="mtp2", mtp_num_layers=0),
        dataclasses.replace(SFT, model="vocab", draft_vocab=0),
        dataclasses.replace(SFT, model="vocab", mtp_mode="heads_only"),
        dataclasses.replace(SFT, mtp_mode="heads_only", draft_vocab=50, mtp_loss="nla"),
        dataclasses.replace(SFT, mtp_mode="heads_only", drafter="eagle3.1", mtp_unroll=3, draft_vocab=50),
        dataclasses.replace(SFT, model="mtp2", mtp_mode="heads_only", drafter="eagle3", mtp_num_layers=1),
        dataclasses.replace(SFT, mtp_mode="heads_only", mtp_features=[1, 3], mtp_init="fit_last_layer", mtp_unroll=3),
        dataclasses.replace(SFT, model="vocab", mtp_mode="heads_only", mtp_features=[2], mtp_init="copy_last_layer"),
    ],
)
def test_good_options_pass_without_a_note(here, args):
    assert rules.check(args) == []


@pytest.mark.parametrize("drafter", BLOCKS)
def test_a_block_of_one_token_has_a_note(here, drafter):
    args = dataclasses.replace(SFT, mtp_mode="heads_only", drafter=drafter)
    (note,) = rules.check(args)
    assert mentions(note, f"--drafter {drafter} --mtp_unroll 1")
    assert rules.check(dataclasses.replace(args, mtp_unroll=2)) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"mtp_num_layers": 1}, "--mtp_num_layers 1", "--mtp_init fit_last_layer"),
        ({"model": "mtp2", "mtp_num_layers": 1}, "--mtp_num_layers 1 2", "--mtp_num_layers 2"),
        ({"model": "mtp2", "mtp_num_layers": 3}, "--mtp_num_layers 3 2", "--mtp_init fit_last_layer"),
        (
            {"mtp_num_layers": 1, "mtp_init": "fit_last_layer", "packing": True, "streaming": True, "train_iters": 9},
            "--mtp_init fit_last_layer --streaming",
            "--mtp_init copy_last_layer",
        ),
        (
            {"model": "mtp2", "mtp_num_layers": 0, "mtp_mode": "heads_only"},
            "--mtp_mode heads_only --mtp_num_layers 0",
            "--mtp_num_layers 1",
        ),
        ({"model": "mtp2", "mtp_unroll": 3}, "--mtp_unroll 3 2", "--mtp_num_layers 1 --mtp_init fit_last_layer"),
        (
            {"mtp_num_layers": 1, "mtp_init": "random", "mtp_unroll": 3, "mtp_unroll_weights": "joint"},
            "--mtp_unroll_weights joint --mtp_loss ce",
            "--mtp_loss nla kl tv",
        ),
        ({"mtp_num_layers": 1, "mtp_init": "graft"}, "--mtp_init graft", "--mtp_graft_from DIR"),
        ({"model": "mtp2", "mtp_graft_from": "mtp2"}, "--mtp_graft_from --mtp_init graft", "--mtp_init graft"),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "mtp2"},
            "--mtp_graft_from mtp2 2 1",
            "--mtp_num_layers 2",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "plain"},
            "--mtp_graft_from plain config.json",
            "",
        ),
        ({"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "nowhere"}, "--mtp_graft_from nowhere", ""),
        ({"model": "mtp2", "draft_vocab": 50}, "--draft_vocab 50", "--mtp_mode heads_only --draft_vocab 0"),
        ({"model": "vocab", "mtp_mode": "heads_only", "mtp_loss": "ce"}, "--mtp_loss ce", "--mtp_loss --draft_vocab 0"),
        (
            {"draft_vocab": 50, "mtp_mode": "heads_only", "streaming": True, "packing": True, "train_iters": 9},
            "--draft_vocab 50 --streaming",
            "",
        ),
        ({"draft_vocab": 120, "mtp_mode": "heads_only"}, "--draft_vocab 120", ""),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "vocab"},
            "--mtp_graft_from vocab",
            "--draft_vocab N 0",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "fed"},
            "--mtp_graft_from fed",
            "--draft_for vllm sglang transformers",
        ),
        ({"mtp_mode": "heads_only", "mtp_init": "graft", "mtp_graft_from": "drafted"}, "drafted eagle3", ""),
        ({"mtp_num_layers": 2, "mtp_init": "graft", "mtp_graft_from": "drafted"}, "drafted eagle3", ""),
        ({"mtp_init": "random"}, "--mtp_init random", "--mtp_num_layers 1 --mtp_init random"),
    ],
)
def test_heads(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(SFT, **change))
    assert len(problems) == 1
    assert mentions(problems[0][0], problem)
    assert mentions(problems[0][1], hint)


DRAFTER = {"drafter": "eagle3.1", "mtp_mode": "heads_only"}


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"mtp_mode": "joint"}, "--drafter eagle3.1 --mtp_mode heads_only", "--mtp_mode heads_only"),
        ({"drafter_layers": 2}, "--drafter_layers 2 --drafter dflash dspark", "--drafter dflash"),
        ({"markov_rank": 8}, "--markov_rank 8 --drafter dspark", "--drafter dspark"),
        ({"drafter": "dspark", "markov_rank": -1}, "--markov_rank -1 1024", ""),
        ({"drafter": "dflash", "drafter_layers": 33}, "--drafter_layers 33 16", ""),
        (
            {"drafter": "dspark", "pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Ett|tm|L"},
            "--pipeline_model_parallel_layout Ett|tm|L DSpark",
            "m L",
        ),
        ({"mtp_mode": "joint", "mtp_num_layers": 0}, "--drafter eagle3.1 --mtp_mode heads_only", "heads_only"),
        ({"mtp_num_layers": 2}, "--drafter eagle3.1 2", "--mtp_num_layers 1 --mtp_unroll"),
        ({"mtp_num_layers": 2, "mtp_unroll": 3}, "--drafter eagle3.1 2", "--mtp_num_layers 1 --mtp_unroll"),
        ({"mtp_num_layers": 0}, "--mtp_mode heads_only --mtp_num_layers 0", "--mtp_num_layers"),
        ({"mtp_init": "checkpoint"}, "--mtp_init checkpoint eagle3", "--mtp_init random"),
        ({"mtp_init": "checkpoint", "model": "mtp2"}, "--mtp_init checkpoint eagle3", "--mtp_init random"),
        (
            {"mtp_init": "checkpoint", "model": "drafted", "drafter": "eagle3"},
            "--mtp_init checkpoint eagle3",
            "--mtp_init random",
        ),
        ({"tuner_type": "lora", "mtp_tuner": "lora"}, "--drafter eagle3.1 --tuner_type lora", "--tuner_type"),
        ({"mtp_init": "fit_last_layer"}, "--mtp_init fit_last_layer --drafter eagle3.1", "--mtp_init random"),
        (
            {"mtp_init": "fit_last_layer", "drafter": "dflash"},
            "--mtp_init fit_last_layer --drafter dflash",
            "--mtp_init copy_last_layer",
        ),
        ({"draft_for": "vllm"}, "--draft_for vllm --drafter eagle3.1", ""),
        (
            {"mtp_init": "graft", "mtp_graft_from": "mtp2", "mtp_num_layers": 2},
            "--mtp_init graft --drafter eagle3.1",
            "--mtp_init --mtp_graft_from",
        ),
    ],
)
def test_a_drafter_of_a_frozen_trunk(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(SFT, **DRAFTER | change))
    found = [each for each in problems if mentions(each[0], problem)]
    assert len(found) == 1
    assert mentions(found[0][1], hint)
    assert "fit_last_layer" not in found[0][1]


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"mtp_mode": "joint"}, "--mtp_features 1,3 --mtp_mode heads_only", "--mtp_mode heads_only"),
        ({"mtp_features": [3, 1]}, "--mtp_features 3,1 3", "--mtp_features 1,2"),
        ({"mtp_features": [1, 4]}, "--mtp_features 1,4 3", "--mtp_features 1,2"),
        ({"mtp_features": [0]}, "--mtp_features 0 3", "--mtp_features 1,2"),
        ({"drafter": "dflash"}, "--mtp_features --drafter dflash", ""),
        ({"mtp_num_layers": 2}, "--mtp_features 1,3 2", "--mtp_num_layers 1 --mtp_unroll"),
        ({"mtp_init": "checkpoint"}, "--mtp_init checkpoint mtp_features", "--mtp_init fit_last_layer random"),
        ({"tuner_type": "lora"}, "--mtp_features 1,3 --tuner_type lora", "--tuner_type"),
        ({"draft_for": "vllm_stock"}, "--draft_for vllm_stock --mtp_features 1,3", ""),
    ],
)
def test_a_head_with_features(here, change, problem, hint):
    args = dataclasses.replace(SFT, **{"mtp_features": [1, 3], "mtp_mode": "heads_only"} | change)
    found = [each for each in problems_of(args) if mentions(each[0], problem)]
    assert len(found) == 1
    assert mentions(found[0][1], hint)


def test_features_need_a_language_model(here):
    Path("plain/config.json").write_text(json.dumps(published("Qwen2.5-VL-3B-Instruct")))
    args = dataclasses.replace(SFT, mtp_features=[1], mtp_mode="heads_only")
    assert mention_each(problems_of(args), ["--mtp_features 1 --model plain"])


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({}, "eagle3", "--mtp_mode heads_only --mtp_num_layers 0"),
        ({"tuner_type": "lora"}, "eagle3 --tuner_type lora", "--tuner_type --mtp_num_layers 0"),
        ({"mtp_mode": "heads_only", "mtp_num_layers": 0}, "--mtp_num_layers 0", "--mtp_num_layers"),
        ({"mtp_mode": "heads_only", "mtp_init": "copy_last_layer"}, "--mtp_init copy_last_layer eagle3", "random"),
    ],
)
def test_a_drafter_of_the_checkpoint(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(SFT, model="drafted", **change))
    found = [each for each in problems if mentions(each[0], problem)]
    assert len(found) == 1
    assert mentions(found[0][1], hint)
    assert "fit_last_layer" not in found[0][1]
    assert not any("--drafter" in problem for problem, _ in problems)


@pytest.mark.parametrize(
    "change",
    [
        {"mtp_mode": "heads_only"},
        {"mtp_mode": "heads_only", "mtp_init": "random"},
        {"mtp_mode": "heads_only", "mtp_init": "checkpoint", "drafter": "eagle3.1"},
        {"mtp_mode": "heads_only", "mtp_num_layers": 1, "drafter": "eagle3"},
        {"mtp_num_layers": 0},
        {"mtp_num_layers": 0, "tuner_type": "lora"},
    ],
)
def test_what_the_hints_about_a_drafter_advise_is_accepted(here, change):
    rules.check(dataclasses.replace(SFT, model="drafted", mtp_unroll=3, **change))


@pytest.mark.parametrize(
    "model",
    [
        *("DeepSeek-V3", "ERNIE-4.5-21B-A3B-PT", "GLM-4.5-Air", "MiniMax-M2", "Olmo-3-1025-7B", "Phi-4-mini-instruct"),
        *("Qwen2.5-VL-3B-Instruct", "gemma-3-1b-it", "gpt-oss-20b"),
    ],
)
def test_a_drafter_needs_a_trunk_like_llama(here, model):
    Path("plain/config.json").write_text(json.dumps(published(model)))
    assert mention_each(problems_of(dataclasses.replace(SFT, **DRAFTER)), ["--drafter eagle3.1 --model plain"])


def test_a_drafter_that_continues_with_fewer_tokens(here):
    args = dataclasses.replace(SFT, model="drafted", mtp_mode="heads_only")
    assert mention_each(rules.check(args), ["--mtp_unroll 1 3"])
    assert rules.check(dataclasses.replace(args, mtp_unroll=3)) == []
    assert rules.check(dataclasses.replace(args, mtp_init="random")) == []


CACHED = {"model": "mtp2", "mtp_mode": "heads_only", "cache_trunk_states": "cache"}


def test_states_of_a_trunk_can_be_kept(here):
    for more in ({}, {"packing": True}, {"padding_free": True}, {"num_train_epochs": 3}):
        assert rules.check(dataclasses.replace(SFT, **CACHED | more)) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"mtp_mode": "joint"}, "", "--mtp_mode heads_only"),
        ({"cache_trunk_states": SFT.output_dir}, "--output_dir", ""),
        ({"pipeline_model_parallel_size": 2}, "", ""),
        ({"streaming": True, "packing": True, "train_iters": 9}, "", "--dataset --streaming"),
        ({"micro_batch_size": 4}, "--micro_batch_size 4", "--packing true"),
        ({"packing": True, "sequence_packing_scheduler": "dp_balanced"}, "--sequence_packing_scheduler", ""),
        ({"moe_aux_loss_coeff": 0.1}, "", ""),
    ],
)
def test_states_that_would_not_come_again(here, change, problem, hint):
    world_size = change.get("pipeline_model_parallel_size", 1)
    problems = problems_of(dataclasses.replace(SFT, **CACHED | change), world_size)
    assert len(problems) == 1
    assert problems[0][0].startswith("--cache_trunk_states")
    assert mentions(problems[0][0], problem)
    assert mentions(problems[0][1], hint)


STREAMED = CACHED | {"stream_trunk": True}


def test_a_trunk_can_be_streamed(here):
    for more in ({}, {"packing": True, "stream_trunk_gb": 0.5}, {"acceptance_samples": 0}):
        assert rules.check(dataclasses.replace(SFT, **STREAMED | more)) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"cache_trunk_states": None}, "--cache_trunk_states", "--cache_trunk_states DIR"),
        ({"tuner_type": "lora", "target_modules": ["q_proj"]}, "--tuner_type lora", ""),
        ({"acceptance_samples": 4}, "--acceptance_samples", "evaluate"),
    ],
)
def test_a_streamed_trunk_is_only_read(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(SFT, **STREAMED | change))
    found = [each for each in problems if each[0].startswith("--stream_trunk")]
    assert len(found) == 1
    assert mentions(found[0][0], problem)
    assert mentions(found[0][1], hint)


def test_memory_of_a_streamed_trunk_has_no_effect_alone(here):
    args = dataclasses.replace(SFT, **CACHED | {"stream_trunk_gb": 1.0})
    assert mention_each(rules.check(args), ["--stream_trunk_gb --stream_trunk"])


def test_a_file_is_no_cache(here):
    ((problem, _),) = problems_of(dataclasses.replace(SFT, **CACHED | {"cache_trunk_states": "train.jsonl"}))
    assert mentions(problem, "--cache_trunk_states train.jsonl")


def test_heads_for_an_engine_of_which_nothing_is_known(here, monkeypatch):
    monkeypatch.setitem(DRAFT_FOR, "sglang", lambda family: None)
    ((problem, hint),) = problems_of(dataclasses.replace(SFT, model="mtp2", draft_for="sglang"))
    assert mentions(problem, "--draft_for sglang qwen3")
    assert mentions(hint, "vllm")
    assert rules.check(dataclasses.replace(SFT, model="mtp2", draft_for="vllm")) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"mtp_num_layers": 2, "mtp_init": "random"}, "--draft_for vllm_stock 2", "--mtp_num_layers 1 --mtp_unroll"),
        ({"draft_vocab": 50, "mtp_mode": "heads_only"}, "--draft_for vllm_stock", "--draft_vocab 0"),
    ],
)
def test_heads_for_vllm_without_the_plugin(here, change, problem, hint):
    args = dataclasses.replace(SFT, draft_for="vllm_stock", **change)
    ((found, advice),) = problems_of(args)
    assert mentions(found, problem)
    assert mentions(advice, hint)
    assert rules.check(dataclasses.replace(args, mtp_num_layers=1, mtp_init="random", draft_vocab=None)) == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model_type": "olmo2"}, "--draft_for vllm_stock olmo2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "--draft_for vllm_stock"),
    ],
)
def test_models_whose_heads_need_more_than_vllm_has(here, settings, problem):
    path = Path("plain/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    args = dataclasses.replace(SFT, draft_for="vllm_stock", mtp_mode="heads_only")
    found = [line for line, _ in problems_of(args) if "vllm_stock" in line]
    assert mention_each(found, [problem])


def test_a_learning_rate_of_fine_tuning_is_small_for_heads(here):
    args = dataclasses.replace(SFT, mtp_mode="heads_only", lr=1e-5)
    assert mention_each(rules.check(args), ["--lr 1e-05 0.001"])
    assert rules.check(dataclasses.replace(args, model="mtp2")) == []


def test_a_frozen_trunk_in_another_precision(here):
    config = json.loads(Path("mtp2/config.json").read_text())
    Path("mtp2/config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    args = dataclasses.replace(SFT, model="mtp2", mtp_mode="heads_only")
    (note,) = rules.check(dataclasses.replace(args, torch_dtype="bfloat16"))
    assert mentions(note, "--torch_dtype bfloat16")
    assert rules.check(dataclasses.replace(args, torch_dtype="float32")) == []


def test_heads_with_output_layers_draft_all_tokens(here):
    Path("plain/config.json").write_text(json.dumps(CONFIGS["step3p5"] | {"num_nextn_predict_layers": 1}))
    ((problem, _),) = problems_of(dataclasses.replace(SFT, model="plain", mtp_mode="heads_only", draft_vocab=50))
    assert mentions(problem, "--draft_vocab 50 output layer")


@pytest.mark.parametrize("model", ["plain", "mtp2"])
def test_a_command_without_grafts_refuses_them_and_advises_none(here, model):
    args = GkdArgs(model=model, dataset=["train.jsonl"], output_dir="out", teacher_model="mtp2", mtp_init="graft")
    problems = problems_of(args)
    assert any(mentions(problem, "--mtp_init graft") and mentions(hint, "--mtp_init") for problem, hint in problems)
    assert not any("--mtp_graft_from" in hint for _, hint in problems)


@pytest.mark.parametrize("drafter", ["dflash", "dspark"])
def test_a_block_drafter_reads_a_layer_after_the_first(here, drafter):
    change_config(num_hidden_layers=1)
    ((problem, _),) = problems_of(dataclasses.replace(SFT, mtp_mode="heads_only", drafter=drafter))
    assert mentions(problem, f"--drafter {drafter} --model plain layers")
    assert "config.json" not in problem
    assert "feature_layers" not in problem


def test_a_planned_run_names_its_drafter(here):
    change_config(num_hidden_layers=1)
    run = dataclasses.replace(SFT, **DRAFTER | {"drafter": "dflash"})
    ((problem, hint),) = problems_of(PlannedRun(PlanArgs(), run))
    assert mentions(problem, "--drafter dflash two")
    assert mentions(hint, "MTP heads")
