"""Test the conversion of values from text and files, and back."""

import dataclasses
import datetime
import json
import typing

import pytest
import yaml

from swiftlite.args.commands import (
    BenchArgs,
    DeployArgs,
    EvaluateArgs,
    ExportArgs,
    InferArgs,
    SftArgs,
)
from swiftlite.args.config import FORMER, convert, from_config, near, read_file, write_config
from swiftlite.args.docs import options
from swiftlite.base.errors import OptionError, UserError
from swiftlite.cli.parse import parse
from swiftlite.cli.table import commands
from swiftlite.methods.index import command_of_run
from tests.messages import mention_each, mentions, naming

OPTIONS = options(SftArgs) | options(InferArgs) | {"concurrency": options(BenchArgs)["concurrency"]}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", "1e-5", 1e-5),
        ("lr", 1, 1.0),
        ("train_iters", "12", 12),
        ("train_iters", "none", None),
        ("train_iters", None, None),
        ("min_lr", "null", None),
        ("mtp_mode", "heads_only", "heads_only"),
        ("async_save", "False", False),
        ("async_save", True, True),
        ("dataset", ["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
        ("dataset", "a.jsonl", ["a.jsonl"]),
        ("val_dataset", ["none"], []),
        ("concurrency", ["1,8", "32"], [1, 8, 32]),
        ("concurrency", "1,8", [1, 8]),
        ("concurrency", [1, 8], [1, 8]),
        ("concurrency", 8, [8]),
        ("val_dataset", None, []),
        ("system", "none", None),
        ("model", "none", "none"),
        ("speculative", "none", "none"),
        (
            "vllm_engine_kwargs",
            '{"max_model_len": null, "x": {"y": [1e-1]}}',
            {"max_model_len": None, "x": {"y": [0.1]}},
        ),
        ("vllm_engine_kwargs", {"a": None}, {"a": None}),
        ("vllm_engine_kwargs", "null", None),
    ],
)
def test_convert(name, value, expected):
    result = convert(OPTIONS[name], value)
    assert result == expected
    assert type(result) is type(expected)


def test_none_is_a_choice_before_it_is_no_value():
    """`deploy` drafts if --speculative is not given, but not if it is "none"."""
    speculative = options(DeployArgs)["speculative"]
    assert convert(speculative, "none") == "none"
    assert convert(speculative, None) is None
    assert convert(speculative, "null") is None


@pytest.mark.parametrize(
    ("name", "value", "problem", "hint"),
    [
        ("lr", "abc", "'abc'", ""),
        ("lr", True, "True", ""),
        ("train_iters", "1.5", "'1.5'", ""),
        ("train_iters", 2.0, "2.0", ""),
        ("micro_batch_size", None, "null", ""),
        ("async_save", "maybe", "true false 'maybe'", ""),
        ("async_save", "yes", "true false 'yes'", ""),
        ("async_save", 1, "true false 1", ""),
        ("mtp_mode", "jonit", "joint heads_only 'jonit'", "joint"),
        ("mtp_mode", 3, "joint heads_only 3", ""),
        ("concurrency", "1,x", "'x'", ""),
        ("concurrency", [1, True], "True", ""),
        ("concurrency", ["1,x", "y"], "'x' 'y'", ""),
        ("dataset", 5, "5", ""),
        ("dataset", ["a", 5], "['a', 5]", ""),
        ("system", 5, "5", ""),
        (
            "vllm_engine_kwargs",
            "{a: 1}",
            "JSON 2 '{a: 1}'",
            "--vllm_engine_kwargs '{\"key\": 1}'",
        ),
        ("vllm_engine_kwargs", {"a": datetime.date(2024, 1, 1)}, "JSON date", "--vllm_engine_kwargs"),
        ("vllm_engine_kwargs", {"a": "\ud83d"}, "JSON 'utf-8'", "--vllm_engine_kwargs"),
        ("train_iters", 2**63, "2^63 9223372036854775808", ""),
        ("train_iters", "9" * 5000, f"'{'9' * 196}...", ""),
        ("vllm_limit_mm_per_prompt", [], "JSON []", "--vllm_limit_mm_per_prompt"),
        ("vllm_limit_mm_per_prompt", {"image": 1.5}, "JSON {'image': 1.5}", "--vllm_limit_mm_per_prompt"),
        ("vllm_engine_kwargs", "[1]", "JSON [1]", "--vllm_engine_kwargs '{\"key\": 1}'"),
    ],
)
def test_convert_says_what_it_takes(name, value, problem, hint):
    with pytest.raises(UserError) as raised:
        convert(OPTIONS[name], value)
    assert mentions(raised.value.problem, problem)
    assert mentions(raised.value.hint, hint)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("lerning_rate", "lr"),
        ("learning_rate", "lr"),
        ("global_batchsize", "global_batch_size"),
        ("per_device_train_batch_size", "micro_batch_size"),
        ("save_interval", "save_steps"),
        ("xyzzy", ""),
    ],
)
def test_near(word, expected):
    assert near(word, list(OPTIONS)) == expected


@pytest.mark.parametrize("name", FORMER)
def test_a_run_of_an_earlier_release_is_read(tmp_path, name):
    file = tmp_path / "args.json"
    for value in (False, True):
        file.write_text(json.dumps({"lr": 1e-5, name: value}))
        assert from_config(SftArgs, file) == SftArgs(lr=1e-5)
    with pytest.raises(OptionError) as error:
        parse(SftArgs, [str(file)], "megatron sft")
    assert mentions(str(error.value), f"{name} {FORMER[name]}")
    with pytest.raises(OptionError) as error:
        parse(SftArgs, ["--" + name, "true"], "megatron sft")
    assert FORMER[name] in str(error.value)


def test_near_suggests_nothing_that_is_not_there():
    assert near("learning_rate", ["model"]) == ""


def test_yaml_reads_exponents_without_a_point_as_numbers(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-5\nadam_eps: 1E-08\nvllm_engine_kwargs: {swap: 2e3, name: e5}\n")
    values = {name: value for name, (value, _) in read_file(str(file)).items()}
    assert values == {"lr": 1e-5, "adam_eps": 1e-8, "vllm_engine_kwargs": {"swap": 2e3, "name": "e5"}}
    # Only our loader is taught so; PyYAML's own, which others in this process may use, is as it was.
    assert yaml.safe_load("1e-5") == "1e-5"


# 10^9 texts on its last line, as "billion laughs"; each line names the one before ten times.
ALIAS_BOMB = "o0: &o0 [x]\n" + "".join(f"o{n}: &o{n} [{', '.join([f'*o{n - 1}'] * 10)}]\n" for n in range(1, 9))
ALIAS_BOMB += f"dataset: [{', '.join(['*o8'] * 10)}]\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.yaml", "lr: [1", "run.yaml:1 YAML"),
        ("run.yaml", "- lr", "run.yaml"),
        ("run.yaml", "lr: 1\nseed: 1\nlr: 2\n", "run.yaml:3 lr {dir}/run.yaml:1"),
        ("run.yaml", "lr: 1\nseed: \0\n", "run.yaml:2 YAML #x0000"),
        ("run.yaml", "lr: 1\n? [lr]\n: 1\n", "run.yaml:2"),
        ("run.yaml", "lr: " + "[" * 5000, "run.yaml:1 YAML 100"),
        ("run.yaml", "lr: " + "- " * 5000 + "1", "run.yaml:1 YAML"),
        ("run.yaml", "lr:\n  " + "- " * 5000 + "1", "run.yaml YAML"),
        ("run.yaml", "lr: 1\nseed: " + "9" * 5000, "run.yaml:2 YAML ValueError"),
        ("run.yaml", "lr: 1\nseed: [0x" + "f" * 5000 + "]", "run.yaml:2 YAML ValueError"),
        ("run.yaml", "seed: !!float ''", "run.yaml:1 YAML IndexError"),
        ("run.yaml", "seed: !!bool x", "run.yaml:1 YAML KeyError"),
        ("run.yaml", "seed: 2024-02-31", "run.yaml:1 YAML ValueError"),
        ("run.yaml", ALIAS_BOMB, "run.yaml:5 10000"),
        ("run.yaml", "lr: 1\nmodel: &a [*a]", "run.yaml:2 10000"),
        ("run.json", '{"lr": 1,\n}', "run.json:2 JSON"),
        ("run.json", "[" * 100_000, "run.json:1 JSON 100"),
        ("run.json", '{"seed": ' + "9" * 5000 + "}", "run.json:1 JSON 4300"),
        ("run.json", "[1]", "run.json JSON"),
        ("run.json", '{"lr": 1, "lr": 2}', 'run.json "lr"'),
        ("run.txt", "lr: 1", "run.txt .yaml .yml .json"),
    ],
)
def test_unreadable_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as raised:
        read_file(str(tmp_path / name))
    assert mentions(raised.value.problem, message.format(dir=tmp_path))
    assert raised.value.exit_code == 2


def test_absent_file_and_directory(tmp_path):
    with pytest.raises(UserError, match=naming("no.yaml")):
        read_file(str(tmp_path / "no.yaml"))
    with pytest.raises(UserError, match=naming(str(tmp_path))):
        read_file(str(tmp_path))


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"lr: \xff")
    with pytest.raises(UserError, match=naming("run.yaml UTF-8 4")):
        read_file(str(tmp_path / "run.yaml"))


def test_an_empty_yaml_file_has_no_options(tmp_path):
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert from_config(SftArgs, tmp_path / "run.yaml") == SftArgs()


def test_all_problems_of_a_file_come_together(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nlerning-rate: 1e-5\ntrain-iters: ten\nxyzzy: 1\n")
    with pytest.raises(OptionError) as raised:
        from_config(SftArgs, file)
    assert mention_each(
        raised.value.problems, [f"{file}:2 lerning-rate lr", f"{file}:3 train-iters 'ten'", f"{file}:4 xyzzy"]
    )


@pytest.mark.parametrize(
    "args",
    [
        SftArgs(model="m", dataset=["a", "b#5"], lr=1e-5, min_lr=None, mtp_num_layers=0, system="sys\n2", report_to=[]),
        InferArgs(model="模型", vllm_engine_kwargs={"a": None, "b": [1, {"c": 0.1}]}),
        ExportArgs(to_hf=True, max_shard_size_gb=0.1),
    ],
)
@pytest.mark.parametrize("write", ["json", "yaml"])
def test_a_written_file_reads_back_the_same(tmp_path, args, write):
    path = tmp_path / f"args.{write}"
    if write == "json":
        write_config(args, path)
        assert json.loads(path.read_text()) == dataclasses.asdict(args)
    else:
        path.write_text(yaml.safe_dump(dataclasses.asdict(args)))
    assert from_config(type(args), path) == args


def test_options_of_another_command_are_one_problem(tmp_path):
    path = tmp_path / "a b.json"
    write_config(SftArgs(model="m"), path, "megatron sft")
    assert from_config(SftArgs, path) == SftArgs(model="m")
    with pytest.raises(OptionError) as raised:
        parse(InferArgs, [str(path)], "infer")
    ((problem, hint),) = raised.value.problems
    assert mentions(problem, f"{path} megatron sft infer")
    assert hint.endswith(f"swiftlite megatron sft '{path}'")


@pytest.mark.parametrize(
    ("name", "text", "problem", "hint"),
    [
        ("a.json", '{"lr": 1, "xyzzy": 2}', "a.json xyzzy", "megatron sft --help"),
        ("a.yaml", "lr: 1\nxyzzy: 2\n", "a.yaml:2 xyzzy", "megatron sft --help"),
        ("a.yaml", "lerning_rate: 1\n", "a.yaml:1 lerning_rate", "lr"),
        ("a.yaml", "lr: x\n", "a.yaml:1 lr 'x'", ""),
    ],
)
def test_each_problem_of_a_file_has_a_next_step(tmp_path, name, text, problem, hint):
    (tmp_path / name).write_text(text)
    with pytest.raises(OptionError) as raised:
        parse(SftArgs, [str(tmp_path / name)], "megatron sft")
    ((found, advice),) = raised.value.problems
    assert mentions(found.replace(str(tmp_path) + "/", ""), problem)
    assert mentions(advice, hint)


def test_json_that_cannot_be_parsed_has_a_next_step(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"lr": 1,\n "seed" 2}')
    with pytest.raises(UserError) as raised:
        read_file(str(path))
    assert mentions(raised.value.problem, f"{path}:2")
    assert mentions(raised.value.hint, "9 .yaml")


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        (None, "settings.json", "JSON --megatron_config"),
        ("[1]", "settings.json JSON", ""),
        ('{"decoupled_lr": 1,\n}', "settings.json:2 JSON", "1"),
        ('{"decoupled_lr": 1, "decoupled_lr": 2}', "settings.json decoupled_lr", ""),
    ],
)
def test_the_file_of_one_option_is_json(tmp_path, text, problem, hint):
    path = tmp_path / "settings.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as raised:
        convert(options(SftArgs)["megatron_config"], str(path))
    assert mentions(raised.value.problem.replace(str(tmp_path) + "/", ""), problem)
    assert mentions(raised.value.hint, hint)
    assert "yaml" not in str(raised.value).lower()


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"b": [{"a": 1, "a": 2}]}'])
def test_a_key_that_is_set_twice(text):
    with pytest.raises(UserError, match=naming('"a"')):
        convert(options(InferArgs)["vllm_engine_kwargs"], text)


def test_a_command_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "args.json"
    path.write_text('{"command": ["x"], "lr": 1}')
    with pytest.raises(OptionError) as raised:
        parse(SftArgs, [str(path)], "megatron sft")
    ((problem, _),) = raised.value.problems
    assert mentions(problem, f"{path} command ['x']")
    assert command_of_run({"command": ["x"]}).name == "sft"


def test_a_list_of_numbers_with_a_point():
    option = options(EvaluateArgs)["draft_confidence"]
    assert convert(option, ["0,0.5", "1"]) == [0.0, 0.5, 1.0]
    assert convert(option, 0.25) == [0.25]
    with pytest.raises(UserError, match=naming("'x'")):
        convert(option, "0,x")


def test_every_list_can_be_typed():
    for command in commands():
        for option in options(command.args_class).values():
            if typing.get_origin(option.type) is list:
                assert len(convert(option, ["1"])) == 1
