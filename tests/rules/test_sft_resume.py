"""Test the rules of --resume."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import DpoArgs
from swiftlite.runtime.lock import only_run_in
from tests.messages import mention_each, mentions
from tests.rules.good import SFT, problems_of


@pytest.mark.parametrize(
    ("change", "problem", "hint"), [({"output_dir": "run"}, "--output_dir run checkpoint-20", "--resume")]
)
def test_a_run_that_is_there_or_not(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(SFT, **change))
    assert len(problems) == 1
    assert mentions(problems[0][0], problem)
    assert mentions(problems[0][1], hint)


def test_a_run_without_a_checkpoint_starts_again_but_does_not_mix(here):
    Path("out").mkdir()
    Path("out/args.json").write_text("{}")
    ((problem, hint),) = problems_of(SFT)
    assert mentions(problem, "--output_dir out")
    assert mentions(hint, "--resume")
    assert rules.check(dataclasses.replace(SFT, resume=True)) == []


def test_resume_with_nothing_to_resume_starts(here):
    """A restart loop always passes --resume."""
    assert rules.check(dataclasses.replace(SFT, resume=True)) == []


def test_a_directory_in_use_is_named_with_its_process(here):
    with only_run_in(Path("run")):
        for resume in (False, True):
            ((problem, _),) = problems_of(dataclasses.replace(SFT, output_dir="run", resume=resume))
            assert mentions(problem, f"--output_dir run {os.getpid()}")


@pytest.mark.parametrize("inside", [".", "run", "a/b"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_does_not_write_into_its_model(here, inside, resume):
    directory = str(Path(SFT.model, inside))
    ((problem, _),) = problems_of(dataclasses.replace(SFT, output_dir=directory, resume=resume))
    assert mentions(problem, f"--output_dir {directory}")
    assert mentions(problem, f"--model {SFT.model}")


def test_resume_keeps_what_makes_the_run(here):
    """Heads and schedule must not change. How often a run saves, its layout, and the places of its files may change.

    The content of files is compared when they are read.
    """
    began = dataclasses.replace(SFT, model="mtp2", output_dir="run", train_iters=30)
    Path("run/args.json").write_text(json.dumps(dataclasses.asdict(began)))
    again = dataclasses.replace(began, resume=True)
    assert rules.check(again) == []
    same = dataclasses.replace(
        again, model=str(Path("mtp2").resolve()), mtp_num_layers=2, save_steps=7, micro_batch_size=2
    )
    assert rules.check(same) == []
    same = dataclasses.replace(again, dataset=["val.jsonl"], val_dataset=["train.jsonl"], max_bad_rows=3)
    assert rules.check(same) == []
    other = dataclasses.replace(again, mtp_num_layers=0, weight_decay=0.2)
    assert mention_each(
        [problem for problem, _ in problems_of(other)], ["--resume --mtp_num_layers 0 2", "--resume --weight_decay 0.2"]
    )
    assert mention_each(
        [problem for problem, _ in problems_of(dataclasses.replace(again, model="plain"))],
        ["--resume --model plain mtp2"],
    )
    (note,) = rules.check(dataclasses.replace(again, train_iters=40))
    assert mentions(note, "--train_iters 30 40")


def test_resume_takes_what_messages_about_bad_steps_advise(here):
    began = dataclasses.replace(SFT, model="mtp2", output_dir="run", train_iters=30, lr=1e-3)
    Path("run/args.json").write_text(json.dumps(dataclasses.asdict(began)))
    advised = {"mtp_loss_scaling_factor": 0.05, "lr": 1e-4, "min_lr": 1e-6, "clip_grad": 0.5, "skip_bad_steps": 6.0}
    notes = rules.check(dataclasses.replace(began, resume=True, **advised))
    assert mention_each(notes, [f"--{name} {value}" for name, value in advised.items()])


def test_resume_may_change_how_buckets_are_sent(here):
    buckets = {"pad_buckets_for_high_nccl_busbw": True}
    began = dataclasses.replace(SFT, output_dir="run", train_iters=30, use_distributed_optimizer=True)
    Path("run/args.json").write_text(json.dumps(dataclasses.asdict(began)))
    assert rules.check(dataclasses.replace(began, resume=True, megatron_config=buckets)) == []
    checked = buckets | {"check_for_nan_in_grad": True}
    ((problem, _),) = problems_of(dataclasses.replace(began, resume=True, megatron_config=checked))
    assert mentions(problem, "--resume --megatron_config check_for_nan_in_grad")


def test_a_run_of_a_release_with_more_options_resumes(here):
    """They had no effect in the command, and cannot be given any more."""
    began = DpoArgs(model="plain", dataset=["train.jsonl"], output_dir="run", train_iters=30)
    saved = dataclasses.asdict(began) | {"command": "megatron dpo", "streaming_buffer_size": 500}
    Path("run/args.json").write_text(json.dumps(saved))
    rules.check(dataclasses.replace(began, resume=True))
    ((problem, _),) = problems_of(dataclasses.replace(began, resume=True, seed=5))
    assert mentions(problem, "--resume --seed")


def test_resume_without_a_checkpoint_keeps_the_options_as_well(here):
    """Stored rollouts of the run belong to its options."""
    began = dataclasses.replace(SFT, output_dir="out")
    Path("out").mkdir()
    Path("out/args.json").write_text(json.dumps(dataclasses.asdict(began)))
    assert rules.check(dataclasses.replace(began, resume=True, save_steps=7)) == []
    ((problem, hint),) = problems_of(dataclasses.replace(began, resume=True, seed=5))
    assert mentions(problem, "--resume --seed 5")
    assert mentions(hint, "--seed --output_dir delete")


@pytest.mark.parametrize("saved", [{"command": "megatron dpo"}, {"loss_type": "kto"}])  # earlier runs name none
def test_a_run_of_another_command_is_not_resumed(here, saved):
    began = dataclasses.asdict(dataclasses.replace(SFT, output_dir="run", train_iters=30))
    Path("run/args.json").write_text(json.dumps(began | saved | {"lr": 0.5}))
    again = dataclasses.replace(SFT, output_dir="run", train_iters=30, resume=True)
    ((problem, hint),) = problems_of(again)  # of options that differ there is no word
    assert mentions(problem, "--resume run megatron dpo")
    assert mentions(hint, "swiftlite megatron dpo --output_dir")


@pytest.mark.parametrize(
    ("options", "packs_in_advance"),
    [({"packing": True}, True), ({"packing": True, "sequence_packing_scheduler": "dp_balanced"}, False), ({}, False)],
)
def test_resume_packs_the_same_rows(here, options, packs_in_advance):
    """megatron-core requires that each sample of a packed row is padded to a multiple of 2 x context_parallel_size."""
    began = dataclasses.replace(SFT, output_dir="run", train_iters=30, **options)
    Path("run/args.json").write_text(json.dumps(dataclasses.asdict(began)))
    again = dataclasses.replace(began, resume=True, tensor_model_parallel_size=2)
    rules.check(again, 2)
    again = dataclasses.replace(began, resume=True, context_parallel_size=2)
    if not packs_in_advance:
        rules.check(again, 2)
        return
    ((problem, hint),) = problems_of(again, 2)
    assert mentions(problem, "--resume --context_parallel_size 2 1")
    assert mentions(hint, "--context_parallel_size 1")


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_resume_needs_what_the_run_began_with(here, content):
    path = Path("run/args.json")
    path.unlink()
    if content is not None:
        path.write_text(content)
    ((problem, _),) = problems_of(dataclasses.replace(SFT, output_dir="run", resume=True))
    assert mentions(problem, "--resume run/args.json")


def test_resume_has_steps_left(here):
    resumed = dataclasses.replace(SFT, output_dir="run", resume=True, train_iters=10)
    assert mention_each(problems_of(resumed), ["--train_iters 10 run/checkpoint-20 20"])


@pytest.mark.parametrize(("number", "is_refused"), [(None, False), (499, False), (500, True)])
def test_ephemeral_checkpoints_are_more_frequent_than_others(here, number, is_refused):
    args = dataclasses.replace(SFT, ephemeral_save_steps=number)
    if not is_refused:
        assert rules.check(args) == []
        return
    ((problem, _),) = problems_of(args)
    assert mentions(problem, "--ephemeral_save_steps 500 --save_steps")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric_for_best_model": "loss", "early_stopping_patience": 2, "early_stopping_threshold": 0.1}, None),
        ({"load_best_model_at_end": True, "early_stopping_patience": 2}, None),
        ({"early_stopping_patience": 2}, "--early_stopping_patience --metric_for_best_model"),
        ({"greater_is_better": False}, "--greater_is_better --metric_for_best_model"),
        ({"metric_for_best_model": ""}, "--metric_for_best_model"),
        ({"metric_for_best_model": "eval_"}, "--metric_for_best_model"),
        (
            {"metric_for_best_model": "loss", "early_stopping_threshold": 0.1},
            "--early_stopping_threshold --early_stopping_patience",
        ),
        ({"metric_for_best_model": "loss", "split_dataset_ratio": 0.0}, "--metric_for_best_model --val_dataset"),
        ({"metric_for_best_model": "reward"}, "--metric_for_best_model reward loss"),
        ({"metric_for_best_model": "mtp_1_acceptance"}, "--metric_for_best_model mtp_1_acceptance loss"),
        ({"metric_for_best_model": "eval_mtp_2_acceptance", "model": "mtp2"}, None),
        ({"metric_for_best_model": "acceptance", "model": "mtp2"}, None),
        ({"metric_for_best_model": "mtp_3_loss", "model": "mtp2"}, "mtp_3_loss mtp_1_loss mtp_2_acceptance acceptance"),
        ({"load_best_model_at_end": True, "eval_steps": 200}, "--load_best_model_at_end --save_steps 500 200 400"),
    ],
)
def test_the_best_checkpoint_has_a_metric(here, options, message):
    args = dataclasses.replace(SFT, **options)
    if message is None:
        assert rules.check(args) == []
        return
    ((problem, hint),) = problems_of(args)
    assert mentions(f"{problem} {hint}", message)


@pytest.mark.parametrize(("before", "now"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_state_of_muon_is_not_that_of_another_optimizer(here, before, now):
    began = dataclasses.replace(SFT, output_dir="run", optimizer=before, train_iters=30)
    Path("run/args.json").write_text(json.dumps(dataclasses.asdict(began)))
    again = dataclasses.replace(began, resume=True)
    assert rules.check(again) == []
    ((problem, _),) = problems_of(dataclasses.replace(again, optimizer=now))
    assert mentions(problem, f"--resume --optimizer {before} {now}")
