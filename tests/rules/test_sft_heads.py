"""Rules of MTP heads: the options that break each."""

import dataclasses
import json
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.conventions.index import CONVENTIONS
from tests.rules.good import SFT, problems_of


@pytest.mark.parametrize(
    "args",
    [
        dataclasses.replace(SFT, mtp_num_layers=1, mtp_init="copy_last_layer"),
        dataclasses.replace(SFT, model="mtp2"),
        dataclasses.replace(SFT, mtp_num_layers=1, mtp_init="random", mtp_unroll=3, mtp_loss="kl"),
        dataclasses.replace(SFT, mtp_num_layers=2, mtp_init="graft", mtp_graft_from="mtp2"),
        dataclasses.replace(SFT, model="mtp2", mtp_num_layers=2, mtp_mode="heads_only"),
        dataclasses.replace(SFT, model="mtp2", mtp_num_layers=1, mtp_init="random"),
        dataclasses.replace(SFT, model="mtp2", mtp_num_layers=0),
        dataclasses.replace(SFT, model="vocab", draft_vocab=0),
        dataclasses.replace(SFT, model="vocab", mtp_mode="heads_only"),
        dataclasses.replace(SFT, mtp_mode="heads_only", draft_vocab=50, mtp_loss="nla"),
    ],
)
def test_good_options_pass_without_a_note(here, args):
    assert rules.check(args) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        (
            {"mtp_num_layers": 1},
            "--mtp_num_layers 1, but the checkpoint has no MTP weights",
            "add --mtp_init fit_last_layer to start from its last layer",
        ),
        (
            {"model": "mtp2", "mtp_num_layers": 1},
            "--mtp_num_layers 1, but the checkpoint has MTP depth 2",
            "leave --mtp_num_layers out to train its 2",
        ),
        (
            {"model": "mtp2", "mtp_num_layers": 3},
            "--mtp_num_layers 3, but the checkpoint has MTP depth 2",
            "make all 3 anew",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "fit_last_layer", "packing": True, "streaming": True, "train_iters": 9},
            "--mtp_init fit_last_layer fits to what training rows give the last decoder layer, but --streaming reads",
            "--mtp_init copy_last_layer starts without a fit",
        ),
        (
            {"model": "mtp2", "mtp_num_layers": 0, "mtp_mode": "heads_only"},
            "--mtp_mode heads_only trains MTP heads alone, but --mtp_num_layers is 0",
            "add --mtp_num_layers 1",
        ),
        (
            {"model": "mtp2", "mtp_unroll": 3},
            "--mtp_unroll 3 applies one MTP layer again and again, but there are 2",
            "--mtp_num_layers 1 --mtp_init fit_last_layer",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft"},
            "--mtp_init graft does not say whose heads to take",
            "add --mtp_graft_from DIR",
        ),
        (
            {"model": "mtp2", "mtp_graft_from": "mtp2"},
            "--mtp_graft_from without --mtp_init graft: heads come from checkpoint",
            "add --mtp_init graft",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "mtp2"},
            "--mtp_graft_from mtp2 has MTP depth 2, this run 1",
            "--mtp_num_layers 2",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "plain"},
            "--mtp_graft_from plain: its config.json promises no MTP layer",
            "give a model that has heads",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "nowhere"},
            "--mtp_graft_from nowhere is not a directory",
            "",
        ),
        (
            {"model": "mtp2", "draft_vocab": 50},
            "--draft_vocab 50, which heads learn behind a trunk that stays",
            "add --mtp_mode heads_only; --draft_vocab 0 lets",
        ),
        (
            {"model": "vocab", "mtp_mode": "heads_only", "mtp_loss": "ce"},
            "the checkpoint's heads have a draft vocabulary, and --mtp_loss ce asks for tokens outside of it",
            "leave --mtp_loss out",
        ),
        (
            {"draft_vocab": 50, "mtp_mode": "heads_only", "streaming": True, "packing": True, "train_iters": 9},
            "--draft_vocab 50 counts the training rows, and --streaming reads them later",
            "leave one of the two out",
        ),
        (
            {"draft_vocab": 120, "mtp_mode": "heads_only"},
            "--draft_vocab 120, but the model's whole vocabulary is 120",
            "choose fewer",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "vocab"},
            "--mtp_graft_from vocab has heads with a draft vocabulary",
            "--draft_vocab N, or 0 for all",
        ),
        (
            {"mtp_num_layers": 1, "mtp_init": "graft", "mtp_graft_from": "fed"},
            "--mtp_graft_from fed has heads that were trained for one engine",
            "--draft_for vllm, sglang or transformers",
        ),
        (
            {"mtp_init": "random"},
            "--mtp_init random has no head to fill: the checkpoint has none",
            "add --mtp_num_layers 1 --mtp_init random",
        ),
    ],
)
def test_heads(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(SFT, **change))
    assert len(problems) == 1
    assert problem in problems[0][0]
    assert hint in problems[0][1]


CACHED = {"model": "mtp2", "mtp_mode": "heads_only", "cache_trunk_states": "cache"}


def test_states_of_a_trunk_can_be_kept(here):
    for more in ({}, {"packing": True}, {"padding_free": True}, {"num_train_epochs": 3}):
        assert rules.check(dataclasses.replace(SFT, **CACHED | more)) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"mtp_mode": "joint"}, "keeps what a trunk says that stays as it is", "add --mtp_mode heads_only"),
        ({"pipeline_model_parallel_size": 2}, "with a pipeline: its stages would wait", "tensor parallelism"),
        (
            {"streaming": True, "packing": True, "train_iters": 9},
            "needs rows that are known beforehand",
            "without --streaming",
        ),
        ({"micro_batch_size": 4}, "with --micro_batch_size 4: other rows would meet in every epoch", "--packing true"),
        (
            {"packing": True, "sequence_packing_scheduler": "dp_balanced"},
            "with --sequence_packing_scheduler: each step is packed anew",
            "leave one of the two out",
        ),
        ({"moe_aux_loss_coeff": 0.1}, "a trunk that is read has no routers to balance", "leave out the options"),
    ],
)
def test_states_that_would_not_come_again(here, change, problem, hint):
    world_size = change.get("pipeline_model_parallel_size", 1)
    problems = problems_of(dataclasses.replace(SFT, **CACHED | change), world_size)
    assert len(problems) == 1
    assert problems[0][0].startswith("--cache_trunk_states")
    assert problem in problems[0][0]
    assert hint in problems[0][1]


def test_a_file_is_no_cache(here):
    ((problem, hint),) = problems_of(dataclasses.replace(SFT, **CACHED | {"cache_trunk_states": "train.jsonl"}))
    assert problem == "--cache_trunk_states train.jsonl is a file"
    assert "directory" in hint


def test_heads_for_an_engine_of_which_nothing_is_known(here, monkeypatch):
    monkeypatch.setitem(CONVENTIONS, "sglang", lambda family: None)
    ((problem, hint),) = problems_of(dataclasses.replace(SFT, model="mtp2", draft_for="sglang"))
    assert problem == "--draft_for sglang: what it feeds the heads of a qwen3 has not been measured"
    assert "trained for vllm" in hint
    assert rules.check(dataclasses.replace(SFT, model="mtp2", draft_for="vllm")) == []


def test_a_learning_rate_of_fine_tuning_is_small_for_heads(here):
    args = dataclasses.replace(SFT, mtp_mode="heads_only", lr=1e-5)
    assert rules.check(args) == ["--lr 1e-05 is small for new heads, which hardly move with it; left out, it is 0.001"]
    assert rules.check(dataclasses.replace(args, model="mtp2")) == []


def test_a_frozen_trunk_in_another_precision(here):
    config = json.loads(Path("mtp2/config.json").read_text())
    Path("mtp2/config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    args = dataclasses.replace(SFT, model="mtp2", mtp_mode="heads_only")
    (note,) = rules.check(dataclasses.replace(args, torch_dtype="bfloat16"))
    assert note.startswith("--torch_dtype bfloat16 rounds the trunk")
    assert rules.check(dataclasses.replace(args, torch_dtype="float32")) == []
