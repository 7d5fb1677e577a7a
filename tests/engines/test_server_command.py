"""Test a server's command, as words and as a line for a shell."""

import json
import subprocess
import sys

import pytest

from swiftlite.engines.server_command import ServerCommand, flags


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 256, "max_num_seqs": 4}, ["--max-model-len", "256", "--max-num-seqs", "4"]),
        ({"enforce_eager": True, "enable_prefix_caching": False}, ["--enforce-eager", "--no-enable-prefix-caching"]),
        ({"speculative_config": {"method": "mtp"}, "dtype": None}, ["--speculative-config", '{"method": "mtp"}']),
        ({"allowed_origins": ["a", "b"]}, ["--allowed-origins", "a", "b"]),
    ],
)
def test_keyword_arguments_as_flags(options, words):
    assert flags(options) == words


def test_files_are_written_by_the_line_too(tmp_path):
    path = tmp_path / "a file"
    command = ServerCommand(["cat", str(path)], files={path: '{"a": 1}'})
    done = subprocess.run(["bash", "-c", command.shell_line()], capture_output=True, text=True, check=True)
    assert done.stdout == '{"a": 1}\n'
    path.unlink()
    command.write_files("--some_flag")
    assert path.read_text() == done.stdout


@pytest.mark.parametrize("value", ["1", "logs/a b.jsonl", "a$HOME", 'it\'s "quoted"', "`date`", "a;b", ""])
def test_a_line_for_a_shell(value):
    """Bash really runs the line. The program receives the words and variables unchanged."""
    program = (
        "import json, os, sys; print(json.dumps([os.environ['NAME'], os.environ['PYTHONSAFEPATH'], sys.argv[1:]]))"
    )
    command = ServerCommand([sys.executable, "-c", program, "--flag", value], {"NAME": value})
    done = subprocess.run(["bash", "-c", command.shell_line()], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [value, "1", ["--flag", value]]


@pytest.mark.parametrize(
    "key", ["FIRST", 11223344, ["FIRST", "SECOND"], ["FIRST,SECOND"], "FIRST}SECOND", "FIRST 'SECOND\""]
)
def test_a_redacted_command_has_no_keys(key):
    words = flags({"max_model_len": 256, "api_key": key, "ssl_keyfile_password": "FIRST", "dtype": "float32"})
    shown = ServerCommand(["python", *words], {"VLLM_API_KEY": "FIRST,SECOND", "PORT": "1"}).redacted().shell_line()
    for secret in ("FIRST", "SECOND", "11223344"):
        assert secret not in shown
    assert "--max-model-len 256 --api-key" in shown
    assert "--dtype float32" in shown
    assert " PORT=1 " in shown
