"""Values from text and files, and back."""

import dataclasses
import datetime
import json
import typing

import pytest
import yaml

from swiftlite.args.commands import BenchArgs, DeployArgs, EvaluateArgs, ExportArgs, InferArgs, SftArgs
from swiftlite.args.config import convert, from_config, near, read_file, write_config
from swiftlite.args.docs import options
from swiftlite.cli.table import COMMANDS
from swiftlite.errors import OptionError, UserError

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
    """`deploy` drafts when --speculative is unset, and does not when it is none."""
    speculative = options(DeployArgs)["speculative"]
    assert convert(speculative, "none") == "none"
    assert convert(speculative, None) is None
    assert convert(speculative, "null") is None


@pytest.mark.parametrize(
    ("name", "value", "problem", "hint"),
    [
        ("lr", "abc", "takes a number, not 'abc'", ""),
        ("lr", True, "takes a number, not True", ""),
        ("train_iters", "1.5", "takes a whole number, not '1.5'", ""),
        ("train_iters", 2.0, "takes a whole number, not 2.0", ""),
        ("micro_batch_size", None, "takes a whole number, not null", ""),
        ("async_save", "maybe", "takes true or false, not 'maybe'", ""),
        ("async_save", "yes", "takes true or false, not 'yes'", ""),
        ("async_save", 1, "takes true or false, not 1", ""),
        ("mtp_mode", "jonit", "takes joint or heads_only, not 'jonit'", "did you mean joint?"),
        ("mtp_mode", 3, "takes joint or heads_only, not 3", ""),
        ("concurrency", "1,x", "takes a whole number, not 'x'", ""),
        ("concurrency", [1, True], "takes a whole number, not True", ""),
        ("dataset", 5, "takes one or more names, not 5", ""),
        ("dataset", ["a", 5], "takes one or more names, not ['a', 5]", ""),
        ("system", 5, "takes text, not 5", "put it in quotes"),
        (
            "vllm_engine_kwargs",
            "{a: 1}",
            "takes JSON; at character 2 of '{a: 1}'",
            "--vllm_engine_kwargs '{\"key\": 1}'",
        ),
        ("vllm_engine_kwargs", {"a": datetime.date(2024, 1, 1)}, "takes a JSON object: Object of type date", "--vllm"),
        ("vllm_engine_kwargs", {"a": "\ud83d"}, "takes a JSON object: 'utf-8' codec can't encode", "--vllm"),
        ("train_iters", 2**63, "takes a whole number below 2^63, not 9223372036854775808", ""),
        ("train_iters", "9" * 5000, "takes a whole number, not '999", ""),
        ("vllm_engine_kwargs", "[1]", "takes a JSON object, not [1]", "--vllm_engine_kwargs '{\"key\": 1}'"),
    ],
)
def test_convert_says_what_it_takes(name, value, problem, hint):
    with pytest.raises(UserError) as raised:
        convert(OPTIONS[name], value)
    assert raised.value.problem.startswith(problem)
    assert hint in raised.value.hint


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
        ("run.yaml", "lr: [1", "run.yaml:1: not YAML"),
        ("run.yaml", "- lr", "run.yaml holds no mapping"),
        ("run.yaml", "lr: 1\nseed: 1\nlr: 2\n", "run.yaml:3: lr was given before, at {dir}/run.yaml:1"),
        ("run.yaml", "lr: 1\nseed: \0\n", "run.yaml:2: not YAML: special characters are not allowed: #x0000"),
        ("run.yaml", "lr: 1\n? [lr]\n: 1\n", "run.yaml:2: a list or a mapping stands where a name should"),
        ("run.yaml", "lr: " + "[" * 5000, "run.yaml:1: not YAML: nested more than 100 deep"),
        ("run.yaml", "lr: " + "- " * 5000 + "1", "run.yaml:1: not YAML"),
        ("run.yaml", "lr:\n  " + "- " * 5000 + "1", "run.yaml: not YAML: nested too deeply"),
        ("run.yaml", "lr: 1\nseed: " + "9" * 5000, "run.yaml:2: not YAML: ValueError: Exceeds the limit"),
        ("run.yaml", "lr: 1\nseed: [0x" + "f" * 5000 + "]", "run.yaml:2: not YAML: ValueError: Exceeds the limit"),
        ("run.yaml", "seed: !!float ''", "run.yaml:1: not YAML: IndexError"),
        ("run.yaml", "seed: !!bool x", "run.yaml:1: not YAML: KeyError"),
        ("run.yaml", "seed: 2024-02-31", "run.yaml:1: not YAML: ValueError: day is out of range"),
        ("run.yaml", ALIAS_BOMB, "run.yaml:5: its aliases stand for more than 10000 values"),
        ("run.yaml", "lr: 1\nmodel: &a [*a]", "run.yaml:2: its aliases stand for more than 10000 values"),
        ("run.json", '{"lr": 1,\n}', "run.json:2: not JSON"),
        ("run.json", "[" * 100_000, "run.json:1: not JSON: nested more than 100 deep"),
        ("run.json", '{"seed": ' + "9" * 5000 + "}", "run.json:1: not JSON: a number of more than 4300 digits"),
        ("run.json", "[1]", "run.json holds no JSON object"),
        ("run.txt", "lr: 1", "run.txt is neither .yaml, .yml nor .json"),
    ],
)
def test_unreadable_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as raised:
        read_file(str(tmp_path / name))
    assert message.format(dir=tmp_path) in raised.value.problem
    assert raised.value.exit_code == 2


def test_absent_file_and_directory(tmp_path):
    with pytest.raises(UserError, match=r"no\.yaml does not exist"):
        read_file(str(tmp_path / "no.yaml"))
    with pytest.raises(UserError, match="is a directory"):
        read_file(str(tmp_path))


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"lr: \xff")
    with pytest.raises(UserError, match=r"run\.yaml is not UTF-8 text: byte 4"):
        read_file(str(tmp_path / "run.yaml"))


def test_an_empty_yaml_file_has_no_options(tmp_path):
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert from_config(SftArgs, tmp_path / "run.yaml") == SftArgs()


def test_all_problems_of_a_file_come_together(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nlerning-rate: 1e-5\ntrain-iters: ten\nxyzzy: 1\n")
    with pytest.raises(OptionError) as raised:
        from_config(SftArgs, file)
    assert raised.value.problems == [
        (f"{file}:2: lerning-rate is no option of this command", "did you mean lr?"),
        (f"{file}:3: train-iters takes a whole number, not 'ten'", ""),
        (f"{file}:4: xyzzy is no option of this command", ""),
    ]


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


def test_a_list_of_numbers_with_a_point():
    option = options(EvaluateArgs)["draft_confidence"]
    assert convert(option, ["0,0.5", "1"]) == [0.0, 0.5, 1.0]
    assert convert(option, 0.25) == [0.25]
    with pytest.raises(UserError, match="takes a number, not 'x'"):
        convert(option, "0,x")


def test_every_list_can_be_typed():
    for command in COMMANDS:
        for option in options(command.args_class).values():
            if typing.get_origin(option.type) is list:
                assert len(convert(option, ["1"])) == 1
