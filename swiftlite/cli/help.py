"""The text of `--help`: each field's own words, under its group, with type and default."""

import shutil
import textwrap
import typing
from typing import Any

from swiftlite.args.config import split_type
from swiftlite.args.docs import Option, groups, title
from swiftlite.cli.table import Command, commands


def overview(prefix: str = "") -> str:
    """Return all commands that start with `prefix`, one line each."""
    chosen = [command for command in commands() if command.words.startswith(prefix)]
    width = max(len(command.words) for command in chosen)
    lines = [f"  swiftlite {command.words:<{width}}  {command.line}" for command in chosen]
    return "\n".join(
        [
            "Fine-tune with Multi-Token Prediction on megatron-core; export; serve with the trained heads.",
            "",
            *lines,
            "",
            "swiftlite COMMAND --help lists a command's options; swiftlite --version prints the version.",
        ]
    )


def command_help(command: Command) -> str:
    """Everything that a command takes."""
    width = min(shutil.get_terminal_size().columns, 110)
    first = f"{command.first_option.upper()} ..." if command.first_option else "[FILE.yaml|FILE.json]"
    text = [f"swiftlite {command.words} {first} [--option value ...]", ""]
    text += textwrap.wrap(title(command.args_class), width)
    usage = "- and _ in names are the same."
    if not command.first_option:
        usage = f"Options after the file override the file's; {usage}"
    if command.is_parallel:
        usage += " NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT start several processes."
    text += ["", *textwrap.wrap(usage, width)]
    for heading, members in groups(command.args_class, command.choices()).items():
        text += ["", f"{heading}:"]
        for option in members:
            text.append(f"  --{option.name} {placeholder(option.type)}")
            words = textwrap.wrap(option.doc + default_words(option), width - 6, break_on_hyphens=False)
            text += textwrap.indent("\n".join(words), " " * 6).split("\n")
    return "\n".join(text)


_LISTS = {list[int]: "INT[,INT ...]", list[float]: "NUMBER[,NUMBER ...]"}
"""What stands after the flag of a list of numbers."""


def placeholder(kind: Any) -> str:
    """Return the placeholder after a flag."""
    kind, _ = split_type(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return _LISTS.get(kind, "VALUE [VALUE ...]")
    if typing.get_origin(kind) is dict:
        return "JSON"
    return {bool: "[true|false]", int: "INT", float: "NUMBER", str: "TEXT"}[kind]


def default_words(option: Option) -> str:
    """The default in brackets; a field that may be unset says itself what that means."""
    if option.default in (None, "", []):
        return ""
    return f" [{default_text(option)}]"


def default_text(option: Option) -> str:
    """The default as it would be typed."""
    if isinstance(option.default, list):
        separator = "," if option.type in _LISTS else " "
        return separator.join(map(str, option.default))
    if isinstance(option.default, bool):
        return str(option.default).lower()
    if isinstance(option.default, float):
        return f"{option.default:g}".replace("e-0", "e-")
    return str(option.default)
