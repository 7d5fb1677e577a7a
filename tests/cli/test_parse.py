"""Test the conversion of argv to arguments."""

import json

import pytest

from swiftlite.args.commands import DoctorArgs, DpoArgs, ExportArgs, InferArgs, SftArgs
from swiftlite.base.errors import OptionError, UserError
from swiftlite.cli.parse import parse
from tests.messages import mention_each, mentions, naming


def test_nothing_given_is_all_defaults():
    assert parse(SftArgs, []) == (SftArgs(), [])


def test_every_way_to_write_a_flag():
    argv = "--train-iters 3 --lr=1e-4 --mtp_mode heads_only --dataset a.jsonl b.jsonl#5 --resume"
    args, _ = parse(SftArgs, [*argv.split(), "--dataset_shuffle", "false"])
    assert args == SftArgs(
        train_iters=3,
        lr=1e-4,
        mtp_mode="heads_only",
        dataset=["a.jsonl", "b.jsonl#5"],
        resume=True,
        dataset_shuffle=False,
    )


@pytest.mark.parametrize("text", ["true", "True", "TRUE"])
def test_bool_with_a_value(text):
    assert parse(ExportArgs, ["--to_hf", text])[0].to_hf is True


def test_values_that_begin_with_a_dash():
    assert parse(InferArgs, ["--temperature", "-1e-3", "--system=--be brief--"])[0] == InferArgs(
        temperature=-1e-3, system="--be brief--"
    )


def test_json_option():
    value = {"max_model_len": None, "compilation_config": {"level": 0}}
    args, _ = parse(InferArgs, ["--vllm-engine-kwargs", json.dumps(value)])
    assert args.vllm_engine_kwargs == value


def test_json_option_from_a_file(tmp_path):
    (tmp_path / "settings.json").write_text('{"moe_z_loss_coeff": 0.001}')
    args, _ = parse(SftArgs, ["--megatron_config", str(tmp_path / "settings.json")])
    assert args.megatron_config == {"moe_z_loss_coeff": 0.001}
    with pytest.raises(OptionError, match=naming("--megatron_config absent.json")):
        parse(SftArgs, ["--megatron_config", "absent.json"])


def test_none_unsets_what_a_file_set(tmp_path):
    (tmp_path / "run.yaml").write_text("mtp_num_layers: 1\nval_dataset: [a.jsonl]\nsystem: hello\n")
    argv = [str(tmp_path / "run.yaml"), *"--mtp_num_layers none --val_dataset none --system null".split()]
    assert parse(SftArgs, argv)[0] == SftArgs()


@pytest.mark.parametrize(
    ("name", "text"), [("run.yaml", "lr: 1e-3\nseed: 7\n"), ("run.json", '{"lr": 1e-3, "seed": 7}')]
)
def test_flags_override_the_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert parse(SftArgs, [str(tmp_path / name), "--seed", "8"])[0] == SftArgs(lr=1e-3, seed=8)


def test_all_problems_of_file_and_flags_come_together(tmp_path):
    (tmp_path / "run.yaml").write_text("sed: 7\n")
    argv = f"{tmp_path}/run.yaml --modl m --lr fast --mtp_mode both --train_iters --no_packing --xyzzy 1 2".split()
    with pytest.raises(OptionError) as raised:
        parse(SftArgs, argv, "megatron sft")
    assert mention_each(
        raised.value.problems,
        [
            f"{tmp_path}/run.yaml:1 sed seed",
            "--modl megatron sft --model",
            "--lr 'fast'",
            "--mtp_mode joint heads_only 'both'",
            "--train_iters VALUE",
            "--no_packing megatron sft --packing false",
            "--xyzzy megatron sft --help",
        ],
    )
    assert mentions(str(raised.value), "7")


def test_an_option_that_the_command_does_not_have_may_have_its_default(tmp_path):
    """args.json of a run has all fields, and YAML files share options of several commands."""
    (tmp_path / "run.yaml").write_text('streaming: "false"\nstream_trunk_gb: "4"\ncache_trunk_states: none\n')
    argv = [str(tmp_path / "run.yaml"), "--mtp_mode", "joint", "--seed", "7"]
    assert parse(DpoArgs, argv, "megatron dpo") == (DpoArgs(seed=7), [])
    (tmp_path / "run.yaml").write_text("stream_trunk_gb: 5\nstreaming: 2\n")
    with pytest.raises(OptionError) as raised:
        parse(DpoArgs, [str(tmp_path / "run.yaml"), "--mtp_mode", "heads_only", "--mtp_mod", "joint"], "megatron dpo")
    place = f"{tmp_path}/run.yaml"
    expected = [
        f"{place}:1 --stream_trunk_gb megatron dpo",
        f"{place}:2 streaming",
        "--mtp_mode megatron dpo",
        "--mtp_mod",
    ]
    assert mention_each(raised.value.problems, expected)
    assert "--mtp_mode" not in raised.value.problems[-1][1]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--model", "my", "model"], "--model 2 my"),
        (["--model"], "--model"),
        (["--resume", "checkpoint-5"], "--resume true false 'checkpoint-5'"),
        (["--dataset", "--lr", "1"], "--dataset"),
        (["-m", "x"], "-m"),
        (["--=x"], "--"),
        (["--model", ""], None),
    ],
)
def test_values_that_do_not_fit(argv, problem):
    if problem is None:
        assert parse(SftArgs, argv)[0] == SftArgs()
        return
    with pytest.raises(OptionError) as raised:
        parse(SftArgs, argv)
    assert len(raised.value.problems) == 1
    assert mentions(raised.value.problems[0][0], problem)


def test_a_flag_without_its_value_shows_how_to_write_it():
    with pytest.raises(OptionError) as raised:
        parse(SftArgs, ["--seed", "--lr", "1e-4"])
    assert mention_each(raised.value.problems, ["--seed 42"])


def test_the_file_comes_first(tmp_path):
    with pytest.raises(UserError, match=naming("run.yaml --option")):
        parse(SftArgs, ["run.yaml", "--lr", "1"])
    with pytest.raises(OptionError, match=naming("--lr 2")):
        parse(SftArgs, ["--lr", "1", "run.yaml"])
    (tmp_path / "run.yaml").write_text("lr: 1e-3\n")
    with pytest.raises(OptionError, match=naming("other.yaml")):
        parse(SftArgs, [str(tmp_path / "run.yaml"), "other.yaml"])


def test_a_flag_given_twice_is_noted_and_the_last_one_counts():
    args, notes = parse(SftArgs, "--lr 1 --dataset a b --lr 2".split())
    assert args == SftArgs(lr=2.0, dataset=["a", "b"])
    assert mention_each(notes, ["--lr 2"])


def test_a_list_given_twice_is_refused():
    with pytest.raises(OptionError, match=naming("--dataset")):
        parse(SftArgs, "--dataset a b --dataset c".split())


def test_arguments_are_frozen():
    args, _ = parse(DoctorArgs, ["--model", "m"])
    with pytest.raises(AttributeError):
        args.model = "other"
