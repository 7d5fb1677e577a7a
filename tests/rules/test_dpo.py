"""Test the rules of `megatron dpo`: all messages, and that a usual command is valid."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import DpoArgs
from tests.messages import mentions
from tests.rules.good import change_config, problems_of

DPO = DpoArgs(model="plain", dataset=["train.jsonl"], output_dir="out")
TP_OF_REFERENCE = {"ref_tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("args", "world_size"),
    [
        (DPO, 1),
        (replace(DPO, loss_type="ipo", ref_model="mtp2", padding_free=True), 1),
        (replace(DPO, packing=True, packing_length=4096), 1),
        (replace(DPO, **TP_OF_REFERENCE), 2),
        (replace(DPO, tuner_type="lora"), 1),
        (replace(DPO, loss_type="kto", desirable_weight=0.5, packing=True), 1),  # of single answers
        (replace(DPO, model="vocab", draft_vocab=0), 1),
    ],
)
def test_good_options_pass(here, args, world_size):
    rules.check(args, world_size)


@pytest.mark.parametrize(
    ("args", "problem", "hint"),
    [
        (replace(DPO, ref_logprobs_cache="train.jsonl"), "--ref_logprobs_cache train.jsonl", "directory"),
        (replace(DPO, loss_scale="all"), "--loss_scale megatron dpo", "--loss_scale"),
        (replace(DPO, streaming=True), "--streaming megatron dpo", "--streaming"),
        (
            replace(DPO, sequence_packing_scheduler="dp_balanced", packing=True, packing_length=4096),
            "--sequence_packing_scheduler megatron dpo",
            "",
        ),
        (
            replace(DPO, model="mtp2", mtp_mode="heads_only", cache_trunk_states="cache"),
            "--cache_trunk_states megatron dpo",
            "",
        ),
        (replace(DPO, model="mtp2", mtp_mode="heads_only"), "--mtp_mode heads_only megatron sft", "--mtp_mode"),
        (replace(DPO, packing=True), "2048 --max_length", "--packing_length 4096"),
        (replace(DPO, model="vocab"), "", "--draft_vocab 0 megatron sft"),
        (replace(DPO, label_smoothing=0.5), "--label_smoothing 0.5", ""),
        (replace(DPO, beta=0.0), "--beta 0.0", ""),
        (replace(DPO, ref_model="plian"), "--ref_model plian config.json", "plain"),
        (replace(DPO, ref_pipeline_model_parallel_size=2), "--ref_pipeline_model_parallel_size 2 1", ""),
    ],
)
def test_what_cannot_be_is_named(here, args, problem, hint):
    found = [(text, advice) for text, advice in problems_of(args) if mentions(text, problem)]
    assert found
    assert mentions(found[0][1], hint)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("streaming", True),
        ("loss_scale", "all"),
        ("sequence_packing_scheduler", "dp_balanced"),
        ("cache_trunk_states", "cache"),
    ],
)
def test_an_unsupported_option_has_no_advice_on_its_use(here, option, value):
    """`--streaming` is rejected, so the hint "add --packing" would contradict this message."""
    ((problem, hint),) = problems_of(replace(DPO, **{option: value}))
    assert mentions(problem, f"--{option} megatron dpo")
    assert mentions(hint, f"--{option}")


def test_a_reference_with_other_words_is_named(here):
    Path("ref").mkdir()
    Path("ref/config.json").write_text(json.dumps(json.loads(Path("plain/config.json").read_text())))
    change_config(vocab_size=128)
    assert any(
        mentions(text, "--ref_model ref 120 --model 128") for text, _ in problems_of(replace(DPO, ref_model="ref"))
    )
    Path("ref/config.json").write_text(json.dumps({"model_type": "nobody"}))
    assert any(mentions(text, "--ref_model nobody") for text, _ in problems_of(replace(DPO, ref_model="ref")))


def test_idle_settings_are_noted(here):
    notes = rules.check(replace(DPO, loss_type="orpo", ref_model="mtp2", label_smoothing=0.1, undesirable_weight=0.5))
    for name in ("ref_model mtp2", "label_smoothing 0.1", "undesirable_weight 0.5"):
        assert any(mentions(note, f"--{name} --loss_type orpo") for note in notes)
