"""No option may do nothing: the command's code reads each one, as `args.NAME`."""

import ast
from pathlib import Path

import pytest

import swiftlite
from swiftlite.args.docs import options
from swiftlite.cli.table import COMMANDS

PACKAGE = Path(swiftlite.__file__).parent
READERS = {
    "megatron sft": ["train", "model", "args/plan.py", "args/layout.py", "cli/main.py"],
    "export": ["export", "model", "args/layout.py"],
    "infer": ["infer"],
    "doctor": ["cli/doctor.py"],
}
NAMES = {"args", "layout", "recompute", "distributed", "moe"}
# By a rule, exactly one of --to_hf and --to_mcore is given; the code reads the first.
COMPLEMENTS = {"to_mcore"}


def attributes_of_args(path: Path) -> set[str]:
    """Every NAME of `args.NAME`, or of one of its groups, in a file, or in the files of a folder."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    return {
        node.attr
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in NAMES
    }


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)
def test_every_option_has_a_reader(command):
    read = set().union(*(attributes_of_args(PACKAGE / reader) for reader in READERS[command.words]))
    assert sorted(set(options(command.args_class)) - read - COMPLEMENTS) == []
