"""Rules of what is read, packed and streamed: the options that break each, and those that have no effect."""

import dataclasses
import json
from pathlib import Path

import pytest

from swiftlite import rules
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
        ({"dataset": []}, "--dataset is required", "--dataset train.jsonl"),
        ({"dataset": ["trian.jsonl"]}, "--dataset trian.jsonl does not exist", "did you mean train.jsonl?"),
        ({"dataset": ["train.jsonl#many"]}, "--dataset train.jsonl#many: after # comes", "train.jsonl#500"),
        ({"dataset": ["train.jsonl#0"]}, "--dataset train.jsonl#0: after # comes", "train.jsonl#500"),
        ({"dataset": ["train.jsonl#"]}, "--dataset train.jsonl#: after # comes", "train.jsonl#500"),
        ({"dataset": ["."]}, "--dataset . is a directory", "name the files: train.jsonl val.jsonl"),
        ({"dataset": ["plain"]}, "--dataset plain is a directory", "config.json"),
        ({"dataset": ["plain/model.safetensors"]}, "ends in none of .jsonl, .json, .parquet, .csv, .txt", "JSON lines"),
        (
            {"dataset": ["run/alpaca"]},
            "--dataset run/alpaca does not exist",
            "if a dataset of the hub is meant: --dataset run/alpaca@main",
        ),
        ({"val_dataset": ["vla.jsonl"]}, "--val_dataset vla.jsonl does not exist", "did you mean val.jsonl?"),
    ],
)
def test_files(here, change, problem, hint):
    ((found, advice),) = problems_of(dataclasses.replace(SFT, **change))
    assert problem in found
    assert hint in advice


def test_a_number_sign_in_a_path(here):
    Path("c#").mkdir()
    Path("train.jsonl").rename("c#/train.jsonl")
    for spec in ("c#/train.jsonl", "c#/train.jsonl#2"):
        assert rules.check(dataclasses.replace(SFT, dataset=[spec])) == []
    same = dataclasses.replace(SFT, dataset=["c#/train.jsonl#2"], val_dataset=["c#/train.jsonl"])
    assert any("is in --dataset and in --val_dataset" in note for note in rules.check(same))
    streamed = dataclasses.replace(SFT, dataset=["c#/train.jsonl"], streaming=True, packing=True, train_iters=3)
    assert not any("sample" in note for note in rules.check(streamed))


def test_an_empty_file_is_no_dataset(here):
    Path("train.jsonl").write_text("")
    ((problem, _),) = problems_of(SFT)
    assert problem == "--dataset train.jsonl is empty"


@pytest.mark.parametrize(
    "change",
    [
        {"packing": True},
        {"packing": True, "packing_length": 8192},
        {"padding_free": True},
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
            "--sequence_packing_scheduler dp_balanced needs --packing",
            "add --packing",
        ),
        (
            {"packing": True, "packing_length": 1024},
            "a sample may have --max_length 2048 tokens, a packed row --packing_length 1024",
            "--packing_length 2048, or --max_length 1024",
        ),
        (
            {"streaming": True, "train_iters": 3},
            "--streaming needs --packing: a stream has no batches but of packed rows",
            "add --packing",
        ),
        (
            {"streaming": True, "packing": True},
            "--streaming needs --train_iters: how many rows the files hold shows at their end",
            "add --train_iters N",
        ),
        (
            {"interleave_prob": [0.5, 0.5]},
            "--interleave_prob 0.5 0.5: 2 shares of 1 --dataset",
            "give one number for each of several files, such as --interleave_prob 0.7 0.3",
        ),
        (
            {"interleave_prob": [1.0], "dataset": ["train.jsonl"]},
            "--interleave_prob 1: 1 shares of 1 --dataset",
            "give one number for each of several files, such as --interleave_prob 0.7 0.3",
        ),
        (
            {"interleave_prob": [1.0, 0.0], "dataset": ["train.jsonl", "val.jsonl"]},
            "--interleave_prob 1 0: each share must be a number above 0",
            "leave out what is not to be read",
        ),
        (
            {"interleave_prob": [1.0, 1.0], "dataset": ["train.jsonl", "train.jsonl"]},
            "--interleave_prob with a file that --dataset names twice",
            "name it once, with a larger share",
        ),
        (
            {"interleave_prob": [1.0, 1.0], "dataset": [], "sft_mock_dataset_config_json": MOCK},
            "--interleave_prob mixes files of --dataset, not random tokens",
            "leave --interleave_prob out",
        ),
        (
            {"sft_mock_dataset_config_json": MOCK},
            "--dataset and --sft_mock_dataset_config_json: one run trains on one of them",
            "leave one out",
        ),
        (
            {"sft_mock_dataset_config_json": MOCK, "dataset": [], "max_length": 512},
            "--sft_mock_dataset_config_json: samples of up to 2048 tokens, over --max_length 512",
            "--max_length 2048",
        ),
        (
            {"sft_mock_dataset_config_json": MOCK | {"min_seq_len": 0}, "dataset": []},
            '--sft_mock_dataset_config_json: "min_seq_len": 0 is not a whole number of at least 1',
            None,
        ),
    ],
)
def test_problems(here, change, problem, hint):
    (found,) = problems_of(dataclasses.replace(SFT, **change))
    assert found[0] == problem
    assert hint is None or found[1] == hint


def test_context_parallel_ranks_share_each_sample(here):
    packed = dataclasses.replace(SFT, packing=True, max_length=2046, context_parallel_size=2)
    ((problem, hint),) = problems_of(packed, world_size=2)
    assert problem == (
        "a sample may have --max_length 2046 tokens, which 2 context-parallel ranks share as 2048, a packed row "
        "--packing_length 2046"
    )
    assert hint == "--packing_length 2048, or --max_length 2044"


def test_resuming_keeps_the_rows(here):
    Path("out/checkpoint-5").mkdir(parents=True)
    resumed = dataclasses.replace(SFT, packing=True, resume=True, context_parallel_size=2)
    Path("out/args.json").write_text(json.dumps(dataclasses.asdict(dataclasses.replace(SFT, packing=True))))
    ((problem, hint),) = problems_of(resumed, world_size=2)
    assert problem.startswith("--resume with --context_parallel_size 2, but this run began with 1: each sample")
    assert hint == "--context_parallel_size 1"
    assert rules.check(dataclasses.replace(resumed, context_parallel_size=1)) == []


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"packing_length": 4096}, "--packing_length 4096 has no effect: --packing is not given"),
        ({"packing": True, "padding_free": True}, "--padding_free true has no effect: --packing leaves no padding"),
        (
            {"packing": True, "sequence_packing_scheduler": "dp_balanced", "micro_batch_size": 4},
            "--micro_batch_size 4 has no effect: micro-batches are as many as --packing_length needs",
        ),
        (
            {"packing": True, "streaming": True, "train_iters": 3},
            "--streaming without --val_dataset: nothing is held out, so nothing is evaluated",
        ),
        ({"streaming_buffer_size": 7}, "--streaming_buffer_size 7 has no effect: --streaming is not given"),
    ],
)
def test_notes(here, change, note):
    assert rules.check(dataclasses.replace(SFT, **change)) == [note]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("train.jsonl#2", "--dataset train.jsonl#2 with --streaming: a sample needs the whole file"),
        ("train.csv", "--dataset train.csv with --streaming: only .jsonl and .parquet are read row by row"),
    ],
)
def test_a_stream_is_read_row_by_row(here, name, problem):
    Path("train.csv").write_text("query,response\nq,r\n")
    streamed = dataclasses.replace(SFT, dataset=[name], packing=True, streaming=True, train_iters=3)
    assert [found for found, _ in problems_of(streamed)] == [problem]


def test_a_file_of_lengths_that_is_not_there(here):
    mock = {"mode": "file", "path": "lengths.csv"}
    ((problem, _),) = problems_of(dataclasses.replace(SFT, dataset=[], sft_mock_dataset_config_json=mock))
    assert problem == "--sft_mock_dataset_config_json: lengths.csv is no file"
