"""Test the whole command line: output and exit codes. Nothing in these tests may import torch."""

import errno
import json
import os
import subprocess
import sys
import types

import pytest
import torch

from swiftlite.args.commands import DoctorArgs
from swiftlite.base.errors import UserError
from swiftlite.cli import table
from swiftlite.cli.main import main
from swiftlite.cli.table import commands
from swiftlite.launch import failure
from tests.messages import has_line, mention_each, mentions
from tests.rules.good import SIZES

STEERING = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
HEAVY = ("torch", "transformers", "megatron", "numpy", "tokenizers", "vllm")


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    config = {"model_type": "qwen3", "num_nextn_predict_layers": 1, **SIZES}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "train.jsonl").write_text('{"query": "q", "response": "r"}\n' * 20)
    return directory


@pytest.fixture
def swiftlite(tmp_path, monkeypatch, capsys):
    """Return a function like that of tests/conftest.py which does not start a process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name in STEERING:
        monkeypatch.delenv(name, raising=False)

    def run(*argv: str, **env: str) -> types.SimpleNamespace:
        with monkeypatch.context() as patches:
            for name, value in env.items():
                patches.setenv(name, value)
            code = main(list(argv))
        captured = capsys.readouterr()
        return types.SimpleNamespace(returncode=code, stdout=captured.out, stderr=captured.err)

    return run


def test_without_a_command_the_commands_are_listed(swiftlite):
    bare, asked = swiftlite(), swiftlite("--help")
    assert bare.stdout == asked.stdout
    assert (bare.returncode, asked.returncode) == (0, 0)
    for command in commands():
        assert f"swiftlite {command.words} " in bare.stdout


def test_the_first_word_of_a_command_lists_what_follows(swiftlite):
    result = swiftlite("megatron")
    assert result.returncode == 0
    assert "swiftlite megatron sft" in result.stdout
    assert "swiftlite export" not in result.stdout
    assert swiftlite("megatron", "--help").stdout == result.stdout


def test_version(swiftlite):
    assert swiftlite("--version").stdout == "swiftlite 0.1.0\n"


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (["sft"], "swiftlite megatron sft"),
        (["megatron", "stf"], "swiftlite megatron sft"),
        (["exprot", "--to_hf"], "swiftlite export"),
        (["megatron", "kto"], "swiftlite megatron dpo --loss_type kto"),
        (["doctr"], "swiftlite doctor"),
    ],
)
def test_unknown_command(swiftlite, argv, near):
    result = swiftlite(*argv)
    assert (result.returncode, result.stdout) == (2, "")
    given = " ".join(word for word in argv if not word.startswith("-"))
    assert mentions(result.stderr, f"{given} {near}")


def test_a_command_like_no_other(swiftlite):
    result = swiftlite("xyzzy")
    assert result.returncode == 2
    assert ", ".join(command.words for command in commands()) in result.stderr


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_a_command(swiftlite, flag):
    for command in commands():
        result = swiftlite(*command.words.split(), flag)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(f"usage: swiftlite {command.words} ")


def test_a_command_without_stdout_is_no_error(tmp_path):
    line = f"{sys.executable} -m swiftlite --version >&-; echo $?"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert (result.stdout, result.stderr) == ("0\n", "")


@pytest.mark.parametrize("words", ["megatron sft --help", "doctor"])
def test_a_reader_that_closes_early_is_no_error(tmp_path, words):
    """The exit code is that of programs which the signal SIGPIPE ends."""
    line = f"{sys.executable} -m swiftlite {words} | (exec <&-; sleep 0.1); echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert (result.stdout, result.stderr) == ("141\n", "")


ANSWERED = [
    ("--help", 0),
    *((f"{command.words} --help", 0) for command in commands()),
    ("megatron sft --lerning_rate 1", 2),
    ("megatron sft --model nowhere", 2),
    ("megatron sft --model model --dataset train.jsonl --output_dir out --dry_run", 0),
    ("export --to_hf", 2),
    ("infer --model nowhere", 2),
    ("deploy --model nowhere", 2),
    ("bench --model nowhere", 2),
    ("doctor", 0),
]
"""Command lines and their exit codes."""


def test_answers_come_without_heavy_imports(model):
    """Without these imports, start-up takes about as long as that of Python (measured by scripts/bench/startup.py)."""
    script = f"""
import sys
from swiftlite.cli.main import main
for words, code in {ANSWERED!r}:
    assert main(words.split()) == code, words
    heavy = {{name.partition(".")[0] for name in sys.modules}} & set({HEAVY!r})
    assert not heavy, (words, heavy)
assert main(["infer", "-h"]) == 0
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, cwd=model.parent, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "passive 30000"),
        ({"OMP_WAIT_POLICY": "active"}, "active None"),
        ({"GOMP_SPINCOUNT": "5"}, "passive 5"),
    ],
)
def test_threads_wait_with_little_spinning_unless_the_user_says_so(model, given, found):
    """torch reads these variables when it is imported."""
    script = (
        "import os, sys; from swiftlite.cli.main import main; main(['doctor']); "
        "print(*map(os.environ.get, ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')), file=sys.stderr)"
    )
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | given
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, cwd=model.parent, env=environment, check=True)
    assert result.stderr.splitlines()[-1] == found


def test_help_does_not_wait_for_pydantic(tmp_path):
    script = (
        "import sys; from swiftlite.cli.main import main; main(['infer', '-h']); sys.exit('pydantic' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=tmp_path, check=True)


def test_every_problem_of_a_command_line_is_told_at_once(swiftlite, tmp_path):
    result = swiftlite("megatron", "sft", "--modl", "x", "--lr", "fast")
    assert (result.returncode, result.stdout) == (2, "")
    first, *others = result.stderr.splitlines()
    assert mentions(first, "swiftlite: 2")
    assert mention_each(others, ["--modl megatron sft", "--model", "--lr 'fast'"])
    assert list(tmp_path.iterdir()) == []


def test_every_broken_rule_is_told_at_once(swiftlite, model):
    argv = "megatron sft --model model --global_batch_size 16 --mtp_num_layers 2 --output_dir out".split()
    result = swiftlite(*argv, NPROC_PER_NODE="6")
    assert result.returncode == 2
    first, *others = result.stderr.splitlines()
    assert mentions(first, "swiftlite: 3")
    assert mention_each(
        others,
        [
            "--dataset",
            "--dataset train.jsonl",
            "--global_batch_size 16 1 6",
            "12 18 24",
            "--mtp_num_layers 2 1",
            "--mtp_num_layers 1 2 --mtp_init fit_last_layer random",
        ],
    )


def test_dry_run_prints_the_plan_and_writes_nothing(swiftlite, model, tmp_path):
    (tmp_path / "run.yaml").write_text("model: model\ndataset: [train.jsonl]\noutput_dir: out\nglobal_batch_size: 8\n")
    result = swiftlite("megatron", "sft", "run.yaml", "--dry_run", "--num_train_epochs", "2", NPROC_PER_NODE="4")
    assert (result.returncode, result.stderr) == (0, "")
    assert mentions(result.stdout.splitlines()[0], "config.json")
    assert has_line(result.stdout, "4 = 4")
    assert has_line(result.stdout, "8 = 1 4 2")
    assert has_line(result.stdout, "5 = 20 2")
    assert has_line(result.stdout, "MTP 1")
    assert not (tmp_path / "out").exists()


def test_dry_run_says_what_has_no_effect(swiftlite, model):
    argv = "megatron sft --model model --dataset train.jsonl --output_dir out --dry_run --packing_length 9".split()
    result = swiftlite(*argv)
    assert has_line(result.stderr, "--packing_length 9 --packing")
    assert "packing" not in result.stdout


def test_dry_run_names_heads_that_a_drafter_replaces(swiftlite, model):
    argv = "megatron sft --model model --dataset train.jsonl --output_dir out --dry_run --mtp_mode heads_only".split()
    result = swiftlite(*argv, "--drafter", "eagle3.1")
    assert result.returncode == 0
    assert has_line(result.stdout, "drafter eagle3 random 1 mtp")
    assert has_line(result.stdout, "features 1, 2, 3")
    assert "MTP depth" not in result.stdout
    assert not has_line(swiftlite(*argv).stdout, "MTP mtp")


def test_dry_run_says_on_how_many_nodes_the_run_can_continue(swiftlite, model):
    """Three nodes of two ranks do not divide the global batch size."""
    argv = "megatron sft --model model --dataset train.jsonl --output_dir out --dry_run --global_batch_size 8".split()
    nodes = {"NNODES": "1:4", "MASTER_ADDR": "localhost", "NODE_RANK": "0", "NPROC_PER_NODE": "2"}
    result = swiftlite(*argv, "--max_restarts", "3", **nodes)
    assert result.returncode == 0, result.stderr
    assert has_line(result.stdout, "restarts 3 1, 2, 4")


def test_dry_run_of_a_sample(swiftlite, model):
    """If a sample has more rows than the file, it is the whole file."""
    argv = "megatron sft --model model --output_dir out --dry_run --dataset train.jsonl#99999 train.jsonl#12".split()
    assert has_line(swiftlite(*argv).stdout, "2 = 32 1")


def test_bad_environment(swiftlite, model):
    result = swiftlite("megatron", "sft", "--model", "model", NPROC_PER_NODE="two", NNODES="2")
    assert result.returncode == 2
    assert has_line(result.stderr, "NPROC_PER_NODE two 1")
    assert has_line(result.stderr, "NNODES=2 MASTER_ADDR")


def test_one_process_commands_say_that_they_are(swiftlite):
    result = swiftlite("doctor", NPROC_PER_NODE="2")
    assert has_line(result.stderr, "NPROC_PER_NODE NNODES swiftlite doctor")


@pytest.mark.parametrize(
    ("outcome", "code", "lines"),
    [
        (None, 0, []),
        (7, 7, []),
        (UserError("no rows are left", "raise --max_length"), 1, ["swiftlite: no rows are left", "raise --max_length"]),
        (UserError("cannot be", exit_code=3), 3, ["swiftlite: cannot be"]),
        (UserError("refused: {'api_key': 'SECRET'}"), 1, ["swiftlite: refused: {'api_key': '***'}"]),
        (KeyboardInterrupt(), 130, ["swiftlite:"]),
        (OSError(errno.EIO, "Input/output error", "run/args.json"), 1, ["swiftlite: 5 'run/args.json'", ""]),
        (PermissionError(errno.EACCES, "Permission denied", "rows.jsonl"), 1, ["swiftlite: 13 'rows.jsonl'", ""]),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
            1,
            [
                "swiftlite: CUDA 20.00 GiB",
                "--micro_batch_size --max_batch_size --max_length --recompute_granularity full swiftlite doctor --plan",
            ],
        ),
    ],
)
def test_how_a_command_ends_is_how_the_process_ends(monkeypatch, capsys, outcome, code, lines):
    end_with(monkeypatch, outcome)
    assert main(["end"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert mention_each(captured.err.splitlines(), lines)


def test_other_exceptions_keep_their_traceback(monkeypatch):
    end_with(monkeypatch, ZeroDivisionError("ours to mend"))
    with pytest.raises(ZeroDivisionError, match="ours to mend"):
        main(["end"])


def end_with(monkeypatch, outcome):
    """Add a command `end` to the table of commands, which returns or raises `outcome`."""

    def run(args):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setitem(sys.modules, "ending", types.SimpleNamespace(run=run))
    command = table.Command("end", DoctorArgs, "ending:run", "", False)
    monkeypatch.setattr(table, "OTHERS", (*table.OTHERS, command))


def test_ranks_that_end_alike_speak_once(monkeypatch, capsys, tmp_path):
    end_with(monkeypatch, UserError("train.jsonl:3: no answer"))
    monkeypatch.setenv("SWIFTLITE_TOLD_DIR", str(tmp_path))
    assert [main(["end"]), main(["end"])] == [1, 1]
    end_with(monkeypatch, UserError("train.jsonl:4: no answer"))
    assert main(["end"]) == 1
    assert capsys.readouterr().err == "swiftlite: train.jsonl:3: no answer\nswiftlite: train.jsonl:4: no answer\n"


def test_a_message_with_half_a_surrogate_pair_is_said(monkeypatch, tmp_path, capsys):
    """Ranks identify a message by a digest of its text. JSON can contain text that cannot be encoded."""
    monkeypatch.setenv(failure.FOLDER, str(tmp_path))
    assert main(["doctor", "\ud83d.yaml"]) == 2
    assert has_line(capsys.readouterr().err, "\\ud83d.yaml")
