"""Rules that several commands have, by the options of `megatron sft`."""

import dataclasses
from pathlib import Path

import pytest

from swiftlite.args.commands import DoctorArgs
from tests.rules.good import SFT, change_config, problems_of


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"model": ""}, "--model is required", "a directory (config.json, safetensors, tokenizer), a name of the hub"),
        ({"model": "plian"}, "--model plian does not exist", "did you mean plain?"),
        ({"model": "nope"}, "--model nope does not exist", "a name of the hub: ORG/NAME"),
        ({"model": "no/such/dir"}, "--model no/such/dir does not exist", "the directory no/such does not exist either"),
        ({"model": "run/sourse"}, "--model run/sourse does not exist", "did you mean run/source?"),
        ({"model": "plain/x"}, "--model plain/x does not exist", "if a name of the hub is meant: --model plain/x@main"),
        ({"model": "plain/config.json"}, "--model plain/config.json is a file", "--model plain"),
        (
            {"model": "run"},
            "--model run holds megatron-core checkpoints, not a Hugging Face model",
            "swiftlite export --to_hf --model run",
        ),
        ({"model": "run/checkpoint-5"}, "--model run/checkpoint-5 holds megatron-core checkpoints", "export --to_hf"),
        ({"model": "run/source"}, "--model run/source has no *.safetensors file", "download the weights"),
        ({"model": "."}, "--model . has no config.json", "Hugging Face model"),
        ({"model": "a" * 300}, f"--model {'a' * 40}...: a name in it is over 235 bytes", "name a shorter path"),
        ({"dataset": ["a/" * 2100]}, "or all over 4000", "name a shorter path"),
        ({"output_dir": "a\0b"}, "--output_dir 'a\\x00b' holds bytes that are no UTF-8 text, or a NUL", "in UTF-8"),
        ({"system": "\udcff"}, "--system '\\udcff' holds bytes that are no UTF-8 text", "in UTF-8"),
        ({"output_dir": ""}, "--output_dir is required", "name the directory to write"),
        ({"output_dir": "train.jsonl"}, "--output_dir train.jsonl is a file", "name a directory"),
    ],
)
def test_model_and_output_dir(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(SFT, **change))
    assert len(problems) == 1
    assert problem in problems[0][0]
    assert hint in problems[0][1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON object with a model's settings"),
        ("[]", "is no JSON object with a model's settings"),
        ("{}", "is no JSON object with a model's settings"),
        (None, "has no config.json"),
    ],
)
def test_broken_config_json(here, text, message):
    path = Path("plain/config.json")
    path.unlink() if text is None else path.write_text(text)
    ((problem, _),) = problems_of(SFT)
    assert message in problem


@pytest.mark.parametrize("key", ["hidden_size", "max_position_embeddings"])
def test_a_config_that_lacks_a_number(here, key):
    """The run refuses it when it reads the model; a dry run must not pass it."""
    change_config(**{key: None})
    ((problem, hint),) = problems_of(dataclasses.replace(SFT, dry_run=True))
    assert problem == f"plain/config.json (model_type 'qwen3'):\n  {key} is missing or not a number"
    assert "copy it from the model's source again" in hint


@pytest.mark.parametrize("depth", [-1, "one"])
def test_a_depth_that_no_model_has(here, depth):
    change_config(num_nextn_predict_layers=depth)
    ((problem, hint),) = problems_of(dataclasses.replace(SFT, dry_run=True))
    assert problem == f"plain/config.json: num_nextn_predict_layers {depth!r} is not a whole number from 0 to 100"
    assert hint == "copy it from the model's source again"


def test_weights_in_another_format(here):
    Path("plain/model.safetensors").rename("plain/pytorch_model.bin")
    ((problem, hint),) = problems_of(SFT)
    assert problem == "--model plain has no *.safetensors file"
    assert "save_pretrained" in hint


def test_a_place_that_cannot_be_made(here):
    ((problem, hint),) = problems_of(dataclasses.replace(SFT, output_dir="train.jsonl/run"))
    assert problem.startswith("--output_dir train.jsonl/run cannot be made: ")
    assert problem.endswith("train.jsonl is a file")
    assert hint == "name a place you may write"


@pytest.mark.parametrize("name", ["model", "output_dir", "mtp_graft_from"])
@pytest.mark.parametrize(
    ("text", "why"), [("a\0b", "or a NUL"), ("x" * 300, "is over 235 bytes"), ("x/" * 3000, "or all over 4000")]
)
def test_a_path_that_cannot_be(here, name, text, why):
    ((problem, _),) = problems_of(dataclasses.replace(SFT, **{name: text}))
    assert problem.startswith(f"--{name} ")
    assert why in problem


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "vocab_size", "num_nextn_predict_layers"])
@pytest.mark.parametrize("args", [SFT, DoctorArgs(model="plain"), DoctorArgs(model="plain", plan=True)])
def test_sizes_that_no_model_has_are_refused_before_anybody_counts_with_them(here, key, args):
    change_config(**{key: 10**9})
    ((problem, _),) = problems_of(args)
    assert problem.startswith(f"plain/config.json: {key} 1000000000 is not a whole number")
