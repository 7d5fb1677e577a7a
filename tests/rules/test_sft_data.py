"""Test the rules of datasets, packing and streaming: invalid options, and options without effect."""

import dataclasses
import json
from pathlib import Path

import pytest

from swiftlite import rules
from tests.messages import mention_each, mentions
from tests.rules.good import SFT, problems_of

MOCK = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 16,
    "max_seq_len": 2048,
    "mean_seq_len": 300,
    "lognormal_sigma": 1.0,
}


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"dataset": []}, "--dataset", "--dataset train.jsonl"),
        ({"dataset": ["trian.jsonl"]}, "--dataset trian.jsonl", "train.jsonl"),
        ({"dataset": ["train.jsonl#many"]}, "--dataset train.jsonl#many", "train.jsonl#500"),
        ({"dataset": ["train.jsonl#0"]}, "--dataset train.jsonl#0", "train.jsonl#500"),
        ({"dataset": ["train.jsonl#"]}, "--dataset train.jsonl#", "train.jsonl#500"),
        ({"dataset": ["."]}, "--dataset .", "train.jsonl val.jsonl"),
        ({"dataset": ["plain"]}, "--dataset plain", "config.json"),
        ({"dataset": ["plain/model.safetensors"]}, "plain/model.safetensors .jsonl .json .parquet .csv .txt", "JSON"),
        ({"dataset": ["run/alpaca"]}, "--dataset run/alpaca", "--dataset run/alpaca@main"),
        ({"val_dataset": ["vla.jsonl"]}, "--val_dataset vla.jsonl", "val.jsonl"),
    ],
)
def test_files(here, change, problem, hint):
    ((found, advice),) = problems_of(dataclasses.replace(SFT, **change))
    assert mentions(found, problem)
    assert mentions(advice, hint)


def test_a_number_sign_in_a_path(here):
    Path("c#").mkdir()
    Path("train.jsonl").rename("c#/train.jsonl")
    for spec in ("c#/train.jsonl", "c#/train.jsonl#2"):
        assert rules.check(dataclasses.replace(SFT, dataset=[spec])) == []
    same = dataclasses.replace(SFT, dataset=["c#/train.jsonl#2"], val_dataset=["c#/train.jsonl"])
    assert any(mentions(note, "--dataset --val_dataset") for note in rules.check(same))
    streamed = dataclasses.replace(SFT, dataset=["c#/train.jsonl"], streaming=True, packing=True, train_iters=3)
    assert not any("sample" in note for note in rules.check(streamed))


def test_an_empty_file_is_no_dataset(here):
    Path("train.jsonl").write_text("")
    ((problem, _),) = problems_of(SFT)
    assert mentions(problem, "--dataset train.jsonl")


@pytest.mark.parametrize(
    "change",
    [
        {"packing": True},
        {"packing": True, "packing_length": 8192},
        {"padding_free": True},
        {"media_root": ".", "min_pixels": 5, "max_pixels": 5},
        {"packing": True, "sequence_packing_scheduler": "dp_balanced", "global_batch_size": 17},
        {"dataset": ["train.jsonl", "val.jsonl"], "interleave_prob": [0.7, 0.3]},
        {"packing": True, "packing_length": 4096, "sft_mock_dataset_config_json": MOCK, "dataset": []},
    ],
)
def test_good_options_pass_without_a_note(here, change):
    assert rules.check(dataclasses.replace(SFT, **change)) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        (
            {"sequence_packing_scheduler": "dp_balanced"},
            "--sequence_packing_scheduler dp_balanced --packing",
            "--packing",
        ),
        (
            {"packing": True, "packing_length": 1024},
            "--max_length 2048 --packing_length 1024",
            "--packing_length 2048 --max_length 1024",
        ),
        ({"streaming": True, "train_iters": 3}, "--streaming --packing", "--packing"),
        ({"streaming": True, "packing": True}, "--streaming --train_iters", "--train_iters N"),
        ({"media_root": "nowhere"}, "--media_root nowhere", ""),
        ({"media_root": ""}, "--media_root", ""),
        ({"media_root": "train.jsonl"}, "--media_root train.jsonl", ""),
        ({"min_pixels": 6, "max_pixels": 5}, "--min_pixels 6 --max_pixels 5", "--min_pixels 5"),
        ({"interleave_prob": [0.5, 0.5]}, "--interleave_prob 0.5 2 1 --dataset", "--interleave_prob 0.7 0.3"),
        (
            {"interleave_prob": [1.0], "dataset": ["train.jsonl"]},
            "--interleave_prob 1 --dataset",
            "--interleave_prob 0.7 0.3",
        ),
        ({"interleave_prob": [1.0, 0.0], "dataset": ["train.jsonl", "val.jsonl"]}, "--interleave_prob 1 0", ""),
        ({"interleave_prob": [1.0, 1.0], "dataset": ["train.jsonl", "train.jsonl"]}, "--interleave_prob --dataset", ""),
        (
            {"interleave_prob": [1.0, 1.0], "dataset": [], "sft_mock_dataset_config_json": MOCK},
            "--interleave_prob --sft_mock_dataset_config_json",
            "--interleave_prob",
        ),
        ({"sft_mock_dataset_config_json": MOCK}, "--dataset --sft_mock_dataset_config_json", ""),
        (
            {"sft_mock_dataset_config_json": MOCK, "dataset": [], "max_length": 512},
            "--sft_mock_dataset_config_json 2048 --max_length 512",
            "--max_length 2048",
        ),
        (
            {"sft_mock_dataset_config_json": MOCK | {"min_seq_len": 0}, "dataset": []},
            "--sft_mock_dataset_config_json min_seq_len 0 1",
            None,
        ),
    ],
)
def test_problems(here, change, problem, hint):
    (found,) = problems_of(dataclasses.replace(SFT, **change))
    assert mentions(found[0], problem)
    assert hint is None or mentions(found[1], hint)


def test_context_parallel_ranks_share_each_sample(here):
    packed = dataclasses.replace(SFT, packing=True, max_length=2046, context_parallel_size=2)
    ((problem, hint),) = problems_of(packed, world_size=2)
    assert mentions(problem, "--max_length 2046 2 2048 --packing_length")
    assert mentions(hint, "--packing_length 2048 --max_length 2044")


def test_resuming_keeps_the_rows(here):
    Path("out/checkpoint-5").mkdir(parents=True)
    resumed = dataclasses.replace(SFT, packing=True, resume=True, context_parallel_size=2)
    Path("out/args.json").write_text(json.dumps(dataclasses.asdict(dataclasses.replace(SFT, packing=True))))
    ((problem, hint),) = problems_of(resumed, world_size=2)
    assert mentions(problem, "--resume --context_parallel_size 2 1")
    assert mentions(hint, "--context_parallel_size 1")
    assert rules.check(dataclasses.replace(resumed, context_parallel_size=1)) == []


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"packing_length": 4096}, "--packing_length 4096 --packing"),
        ({"packing": True, "padding_free": True}, "--padding_free true --packing"),
        (
            {"packing": True, "sequence_packing_scheduler": "dp_balanced", "micro_batch_size": 4},
            "--micro_batch_size 4 --packing_length",
        ),
        ({"packing": True, "streaming": True, "train_iters": 3}, "--streaming --val_dataset"),
        ({"streaming_buffer_size": 7}, "--streaming_buffer_size 7 --streaming"),
    ],
)
def test_notes(here, change, note):
    assert mention_each(rules.check(dataclasses.replace(SFT, **change)), [note])


@pytest.mark.parametrize(
    ("name", "problem"),
    [("train.jsonl#2", "--dataset train.jsonl#2 --streaming"), ("train.csv", "--dataset train.csv --streaming")],
)
def test_a_stream_is_read_row_by_row(here, name, problem):
    Path("train.csv").write_text("query,response\nq,r\n")
    streamed = dataclasses.replace(SFT, dataset=[name], packing=True, streaming=True, train_iters=3)
    assert mention_each([found for found, _ in problems_of(streamed)], [problem])


def test_a_file_of_lengths_that_is_not_there(here):
    mock = {"mode": "file", "path": "lengths.csv"}
    ((problem, _),) = problems_of(dataclasses.replace(SFT, dataset=[], sft_mock_dataset_config_json=mock))
    assert mentions(problem, "--sft_mock_dataset_config_json lengths.csv")
