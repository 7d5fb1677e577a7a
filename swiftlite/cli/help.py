"""Build the text of `--help`: options by group, with docstring, type and default."""

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
            "usage: swiftlite COMMAND [FILE.yaml|FILE.json] [--option value ...]",
            "",
            "Train, export and serve language models with Multi-Token Prediction heads.",
            "",
            "commands:",
            *lines,
            "",
            "swiftlite COMMAND --help shows the options of a command.",
            "swiftlite --version shows the version.",
        ]
    )


def command_help(command: Command) -> str:
    """Return the usage and all options of a command."""
    width = min(shutil.get_terminal_size().columns, 110)
    first = "[FILE.yaml|FILE.json]"
    if command.first_option:
        first = f"{command.first_option.upper()} ..."
    text = textwrap.wrap(f"usage: swiftlite {command.words} {first} [--option value ...]", width)
    text += ["", *textwrap.wrap(title(command.args_class), width)]
    usage = "- and _ are equivalent in option names."
    if not command.first_option:
        usage = f"Options override those of the file. {usage}"
    if command.is_parallel:
        usage += (
            " For several processes, set the environment variables NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR and "
            "MASTER_PORT."
        )
    text += ["", *textwrap.wrap(usage, width)]
    for heading, members in groups(command.args_class, command.choices()).items():
        text += ["", f"{heading}:"]
        for option in members:
            text.append(f"  --{option.name} {placeholder(option.type)}")
            words = textwrap.wrap(option.doc + default_words(option), width - 6, break_on_hyphens=False)
            text += textwrap.indent("\n".join(words), " " * 6).split("\n")
    return "\n".join(text)


_LISTS = {list[int]: "INT[,INT ...]", list[float]: "NUMBER[,NUMBER ...]"}
"""Placeholders that are printed after the flags of lists of numbers."""


def placeholder(kind: Any) -> str:
    """Return the placeholder of a value after a flag, such as INT."""
    kind, _ = split_type(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return _LISTS.get(kind, "VALUE [VALUE ...]")
    if typing.get_origin(kind) is dict:
        return "JSON"
    return {bool: "[true|false]", int: "INT", float: "NUMBER", str: "TEXT"}[kind]


def default_words(option: Option) -> str:
    """Return the default in brackets; empty for None, which the option's docstring explains."""
    if option.default in (None, "", []):
        return ""
    return f" [{default_text(option)}]"


def default_text(option: Option) -> str:
    """Return the default in the form in which it is typed on a command line."""
    if isinstance(option.default, list):
        separator = " "
        if option.type in _LISTS:
            separator = ","
        return separator.join(map(str, option.default))
    if isinstance(option.default, bool):
        return str(option.default).lower()
    if isinstance(option.default, float):
        return f"{option.default:g}".replace("e-0", "e-")
    return str(option.default)
