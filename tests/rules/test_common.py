"""Test the rules that several commands share, with the options of `megatron sft`."""

import dataclasses
from pathlib import Path

import pytest

from swiftlite import rules
from swiftlite.args.commands import DoctorArgs, EvaluateArgs
from swiftlite.base.errors import UserError
from tests.messages import mentions, naming
from tests.planned import planned
from tests.rules.good import BENCH, DEPLOY, EXPORT, INFER, REGENERATE, SFT, change_config, problems_of


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"model": ""}, "--model", "config.json safetensors"),
        ({"model": "plian"}, "--model plian", "plain"),
        ({"model": "nope"}, "--model nope", "ORG/NAME"),
        ({"model": "no/such/dir"}, "--model no/such/dir", "no/such"),
        ({"model": "run/sourse"}, "--model run/sourse", "run/source"),
        ({"model": "plain/x"}, "--model plain/x", "--model plain/x@main"),
        ({"model": "MS:Qwen/Qwen3-8B"}, "--model MS:Qwen/Qwen3-8B", "ms:Qwen/Qwen3-8B"),
        ({"model": "plain/config.json"}, "--model plain/config.json", "--model plain"),
        ({"model": "run"}, "--model run", "export --to_hf --model run"),
        ({"model": "run/checkpoint-5"}, "--model run/checkpoint-5", "export --to_hf"),
        ({"model": "run/source"}, "--model run/source *.safetensors", ""),
        ({"model": "."}, "--model . config.json", ""),
        ({"model": "a" * 300}, "--model 235", ""),
        ({"dataset": ["a/" * 2100]}, "--dataset 4000", ""),
        ({"output_dir": "a\0b"}, "--output_dir 'a\\x00b' UTF-8 NUL", "UTF-8"),
        ({"system": "\udcff"}, "--system '\\udcff' UTF-8", "UTF-8"),
        ({"output_dir": ""}, "--output_dir", ""),
        ({"output_dir": "train.jsonl"}, "--output_dir train.jsonl", ""),
    ],
)
def test_model_and_output_dir(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(SFT, **change))
    assert len(problems) == 1
    assert mentions(problems[0][0], problem)
    assert mentions(problems[0][1], hint)


@pytest.mark.parametrize(
    "args", [SFT, INFER, REGENERATE, EXPORT, EvaluateArgs(model="mtp2", dataset=["val.jsonl"], output_dir="out")]
)
@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"media_root": "no"}, "--media_root no", ""),
        ({"max_pixels": 64, "min_pixels": 65}, "--min_pixels 65 --max_pixels 64", "--min_pixels 64"),
    ],
)
def test_images_have_a_place_and_a_size(here, args, change, problem, hint):
    ((found, advice),) = problems_of(dataclasses.replace(args, **change))
    assert mentions(found, problem)
    assert mentions(advice, hint)


@pytest.mark.parametrize(
    ("dataset", "hint"),
    [
        ("nope.jsonl", ".jsonl .parquet ORG/NAME"),
        ("tarin.jsonl", "train.jsonl"),
        ("no/such.jsonl", "no"),
        ("plain/rows", "--dataset plain/rows@main"),
        ("plain", "--dataset"),
        ("Ms:org/rows", "ms:org/rows"),
        ("train.jsonl#0", "train.jsonl#500"),
        ("speed-bench:plain", "SPEED-Bench"),
    ],
)
def test_a_dataset_that_cannot_be_read_has_a_next_step(here, dataset, hint):
    ((problem, advice),) = problems_of(dataclasses.replace(SFT, dataset=[dataset]))
    assert mentions(problem, f"--dataset {dataset}")
    assert mentions(advice, hint)


@pytest.mark.parametrize("option", ["model", "mtp_graft_from"])
def test_a_name_that_the_hub_does_not_have_comes_with_its_option(here, monkeypatch, option):
    """`p3/m` may be a path with a typo; the option's name tells the user which one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    args = dataclasses.replace(SFT, **{option: "p3/m"}, mtp_init="graft")
    with pytest.raises(UserError, match=naming(f"--{option} p3/m")):
        rules.check(args)


@pytest.mark.parametrize(
    "args", [INFER, dataclasses.replace(DEPLOY, speculative="mtp"), BENCH, EvaluateArgs(dataset=["val.jsonl"])]
)
def test_a_model_without_heads_is_named_with_its_option(here, args):
    problems = problems_of(dataclasses.replace(args, model="plain"))
    assert any(mentions(problem, "--model plain/config.json") for problem, _ in problems)


def test_a_size_that_config_json_lacks_is_named_with_the_option(here):
    change_config(hidden_size=None)
    assert any(mentions(problem, "--model plain/config.json hidden_size") for problem, _ in problems_of(SFT))


@pytest.mark.parametrize(("text", "message"), [("{", "JSON"), ("[]", "JSON"), ("{}", "JSON"), (None, "config.json")])
def test_broken_config_json(here, text, message):
    path = Path("plain/config.json")
    path.unlink() if text is None else path.write_text(text)
    ((problem, _),) = problems_of(SFT)
    assert mentions(problem, message)


@pytest.mark.parametrize("key", ["hidden_size", "max_position_embeddings"])
def test_a_config_that_lacks_a_number(here, key):
    """The run rejects such a model when it reads it, so a dry run must reject it too."""
    change_config(**{key: None})
    ((problem, _),) = problems_of(dataclasses.replace(SFT, dry_run=True))
    assert mentions(problem, f"plain/config.json model_type 'qwen3' {key}")


@pytest.mark.parametrize("depth", [-1, "one"])
def test_a_depth_that_no_model_has(here, depth):
    change_config(num_nextn_predict_layers=depth)
    ((problem, _),) = problems_of(dataclasses.replace(SFT, dry_run=True))
    assert mentions(problem, f"plain/config.json num_nextn_predict_layers {depth!r} 0 100")


def test_weights_in_another_format(here):
    Path("plain/model.safetensors").rename("plain/pytorch_model.bin")
    ((problem, hint),) = problems_of(SFT)
    assert mentions(problem, "--model plain *.safetensors")
    assert "save_pretrained" in hint


def test_a_place_that_cannot_be_made(here):
    ((problem, _),) = problems_of(dataclasses.replace(SFT, output_dir="train.jsonl/run"))
    assert mentions(problem, "--output_dir train.jsonl/run train.jsonl")


@pytest.mark.parametrize("name", ["model", "output_dir", "mtp_graft_from"])
@pytest.mark.parametrize(("text", "why"), [("a\0b", "NUL"), ("x" * 300, "235"), ("x/" * 3000, "4000")])
def test_a_path_that_cannot_be(here, name, text, why):
    ((problem, _),) = problems_of(dataclasses.replace(SFT, **{name: text}))
    assert mentions(problem, f"--{name}")
    assert mentions(problem, why)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "vocab_size", "num_nextn_predict_layers"])
@pytest.mark.parametrize("args", [SFT, DoctorArgs(model="plain"), planned(model="plain")])
def test_sizes_that_no_model_has_are_refused_before_anybody_counts_with_them(here, key, args):
    change_config(**{key: 10**9})
    ((problem, _),) = problems_of(args)
    assert mentions(problem, f"plain/config.json {key} 1000000000")
