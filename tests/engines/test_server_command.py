"""Test a server's command, as words and as a line for a shell."""

import subprocess

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


def test_a_line_for_a_shell():
    command = ServerCommand(["python", "-m", "a server"], {"NAME": "1"})
    assert command.shell_line() == "NAME=1 python -m 'a server'"
