"""Rules of `megatron dpo`: each message, and that a usual command breaks none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import DpoArgs
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
        (
            replace(DPO, loss_scale="all"),
            "--loss_scale is no option of megatron dpo: of a pair",
            "leave --loss_scale out",
        ),
        (replace(DPO, streaming=True), "--streaming is no option of megatron dpo", "leave --streaming out"),
        (
            replace(DPO, sequence_packing_scheduler="dp_balanced", packing=True, packing_length=4096),
            "--sequence_packing_scheduler is no option of megatron dpo: it levels samples",
            "leave",
        ),
        (
            replace(DPO, model="mtp2", mtp_mode="heads_only", cache_trunk_states="cache"),
            "--cache_trunk_states is no option of megatron dpo: the trunk learns",
            "leave",
        ),
        (replace(DPO, model="mtp2", mtp_mode="heads_only"), "--mtp_mode heads_only: pairs teach", "megatron sft"),
        (
            replace(DPO, packing=True),
            "a packed row of 2048 tokens has no room for two answers of --max_length 2048",
            "--packing_length 4096",
        ),
        (
            replace(DPO, model="vocab"),
            "the checkpoint's heads have a draft vocabulary, which heads learn behind a trunk that stays",
            "--draft_vocab 0 lets them draft all tokens; swiftlite megatron sft",
        ),
        (replace(DPO, label_smoothing=0.5), "--label_smoothing 0.5 must be", ""),
        (replace(DPO, beta=0.0), "--beta 0.0 must be", ""),
        (replace(DPO, ref_model="plian"), "--ref_model plian has no config.json", "did you mean plain?"),
        (
            replace(DPO, ref_pipeline_model_parallel_size=2),
            "the reference model: --pipeline_model_parallel_size 2 does not divide the number of processes, 1",
            "",
        ),
    ],
)
def test_what_cannot_be_is_named(here, args, problem, hint):
    found = [(text, advice) for text, advice in problems_of(args) if problem in text]
    assert found
    assert hint in found[0][1]


def test_a_reference_with_other_words_is_named(here):
    Path("ref").mkdir()
    Path("ref/config.json").write_text(json.dumps(json.loads(Path("plain/config.json").read_text())))
    change_config(vocab_size=128)
    assert any(
        "--ref_model ref has 120 tokens, --model 128" in text for text, _ in problems_of(replace(DPO, ref_model="ref"))
    )
    Path("ref/config.json").write_text(json.dumps({"model_type": "nobody"}))
    assert any("nobody is no known kind" in text for text, _ in problems_of(replace(DPO, ref_model="ref")))


def test_idle_settings_are_noted(here):
    notes = rules.check(replace(DPO, loss_type="orpo", ref_model="mtp2", label_smoothing=0.1, undesirable_weight=0.5))
    for name in ("ref_model mtp2", "label_smoothing 0.1", "undesirable_weight 0.5"):
        assert any(note.startswith(f"--{name} has no effect: --loss_type is orpo") for note in notes)
