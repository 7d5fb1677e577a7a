"""Rules of packing and streaming: the options that break each, and those that have no effect."""

import dataclasses
import json
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import SftArgs
from swiftlite.errors import OptionError

MOCK = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 16,
    "max_seq_len": 2048,
    "mean_seq_len": 300,
    "lognormal_sigma": 1.0,
}


@pytest.fixture
def args(tmp_path, monkeypatch) -> SftArgs:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 8, "num_hidden_layers": 4}
    Path("model/config.json").write_text(json.dumps(config))
    Path("model/model.safetensors").write_bytes(b"weights")
    Path("train.jsonl").write_text('{"query": "q", "response": "r"}\n' * 3)
    return SftArgs(model="model", dataset=["train.jsonl"], output_dir="out")


def problems_of(args: SftArgs, world_size: int = 1) -> list[tuple[str, str]]:
    with pytest.raises(OptionError) as raised:
        rules.check(args, world_size)
    return raised.value.problems


@pytest.mark.parametrize(
    "change",
    [
        {"packing": True},
        {"packing": True, "packing_length": 8192},
        {"padding_free": True},
        {"packing": True, "sequence_packing_scheduler": "dp_balanced", "global_batch_size": 17},
        {"packing": True, "packing_length": 4096, "sft_mock_dataset_config_json": MOCK, "dataset": []},
    ],
)
def test_good_options_pass_without_a_note(args, change):
    assert rules.check(dataclasses.replace(args, **change)) == []


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
            {"streaming": True, "packing": True, "train_iters": 3, "sequence_packing_scheduler": "dp_balanced"},
            "--streaming with --sequence_packing_scheduler dp_balanced: streamed rows are packed as they are read",
            "leave --sequence_packing_scheduler out",
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
def test_problems(args, change, problem, hint):
    (found,) = problems_of(dataclasses.replace(args, **change))
    assert found[0] == problem
    assert hint is None or found[1] == hint


def test_context_parallel_ranks_share_each_sample(args):
    packed = dataclasses.replace(args, packing=True, max_length=2046, context_parallel_size=2)
    ((problem, hint),) = problems_of(packed, world_size=2)
    assert problem == (
        "a sample may have --max_length 2046 tokens, which 2 context-parallel ranks share as 2048, a packed row "
        "--packing_length 2046"
    )
    assert hint == "--packing_length 2048, or --max_length 2044"


def test_resuming_keeps_the_rows(args):
    Path("out/checkpoint-5").mkdir(parents=True)
    resumed = dataclasses.replace(args, packing=True, resume=True, context_parallel_size=2)
    Path("out/args.json").write_text(json.dumps(dataclasses.asdict(dataclasses.replace(args, packing=True))))
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
def test_notes(args, change, note):
    assert rules.check(dataclasses.replace(args, **change)) == [note]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("train.jsonl#2", "--dataset train.jsonl#2 with --streaming: a sample needs the whole file"),
        ("train.csv", "--dataset train.csv with --streaming: only .jsonl and .parquet are read row by row"),
    ],
)
def test_a_stream_is_read_row_by_row(args, name, problem):
    Path("train.csv").write_text("query,response\nq,r\n")
    streamed = dataclasses.replace(args, dataset=[name], packing=True, streaming=True, train_iters=3)
    assert [found for found, _ in problems_of(streamed)] == [problem]


def test_a_file_of_lengths_that_is_not_there(args):
    mock = {"mode": "file", "path": "lengths.csv"}
    ((problem, _),) = problems_of(dataclasses.replace(args, dataset=[], sft_mock_dataset_config_json=mock))
    assert problem == "--sft_mock_dataset_config_json: lengths.csv is no file"
