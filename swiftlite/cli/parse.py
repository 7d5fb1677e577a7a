"""Parse argv into a frozen object with one flag per field of its class. All problems are reported together.

Only the standard library is used: tyro 1.0 and jsonargparse 4.53 add 0.1 s to every command and stop at the first
problem.
"""

import typing
from collections.abc import Sequence
from typing import Any

from swiftlite.args.config import FORMER, Problem, convert, near, not_supported, split_type, values_from_file
from swiftlite.args.docs import Choices, Option, options, unsupported
from swiftlite.base.errors import OptionError, UserError


def parse(
    args_class: type, argv: Sequence[str], command: str = "", choices: Choices | None = None
) -> tuple[Any, list[str]]:
    """Parse flags into the arguments of a command.

    If the first argument is not a flag, it is a YAML or JSON file, whose values the flags override. `--some_flag
    value`, `--some-flag value` and `--some_flag=value` are equivalent. A list includes all values up to the next flag;
    a bool without a value is true.

    Args:
        args_class: frozen dataclass to fill.
        argv: arguments after the command's words.
        command: the command's words, for messages.
        choices: allowed values of options that the class does not restrict.

    Returns:
        The arguments, and notes on flags that were given twice.

    Raises:
        OptionError: arguments are invalid; the error lists all of them, with similar options if there are any.
    """
    known, without = options(args_class, choices, with_unsupported=True), unsupported(args_class)
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    if argv and not argv[0].startswith("-"):
        values, problems = values_from_file(args_class, argv[0], choices, command)
        argv = argv[1:]
    flags, strays = split(argv)
    problems += [(f"unexpected argument {stray}", "write --option value") for stray in strays]
    notes = []
    seen = set()
    for flag, texts in flags:
        name = name_of(flag)
        if name not in known:
            hint = _suggest(name, options(args_class, choices), command)
            problems.append((f"unknown option {flag} for swiftlite {command}", hint))
            continue
        if name in seen and _takes_list(known[name]):
            problems.append((f"--{name} is given twice", f"write all values after one flag: --{name} FIRST SECOND"))
            continue
        if name in seen:
            notes.append(f"--{name} is given twice; using the last value: {' '.join(texts) or 'true'}")
        seen.add(name)
        try:
            values[name] = _value(known[name], texts)
        except UserError as error:
            problems.append((f"invalid value for --{name}: {error.problem}", error.hint))
            continue
        if name in without and values[name] != known[name].default:
            problems.append(not_supported(name, command, without[name]))
    if problems:
        raise OptionError(problems)
    return args_class(**values), notes


def name_of(flag: str) -> str:
    """Return the name of the option of a flag."""
    return flag.removeprefix("--").replace("-", "_")


def split(argv: Sequence[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return (flag, its values) for each flag in order, and the arguments before the first flag."""
    flags: list[tuple[str, list[str]]] = []
    strays = []
    for word in argv:
        is_flag = word.startswith("--") or (word.startswith("-") and word[1:2].isalpha() and not _is_number(word))
        if is_flag:
            name, equals, value = word.partition("=")
            values = []
            if equals:
                values.append(value)
            flags.append((name, values))
        elif flags:
            flags[-1][1].append(word)
        else:
            strays.append(word)
    return flags, strays


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _takes_list(option: Option) -> bool:
    kind, _ = split_type(option.type)
    return typing.get_origin(kind) is list


def _value(option: Option, texts: list[str]) -> Any:
    if _takes_list(option):
        if not texts:
            raise UserError("expected one or more values", f"write --{option.name} VALUE, or none for an empty list")
        return convert(option, texts)
    kind, _ = split_type(option.type)
    if kind is bool and not texts:
        return True
    if not texts:
        example = option.default
        if example in (None, ""):
            example = "VALUE"
        raise UserError("expected a value", f"write --{option.name} {example}")
    if len(texts) > 1:
        raise UserError(f"expected one value, not {len(texts)}: {' '.join(texts)}", "quote a text with spaces")
    return convert(option, texts[0])


def _suggest(name: str, known: dict[str, Option], command: str) -> str:
    positive = known.get(name.removeprefix("no_"))
    if positive is not None and positive.type is bool:
        return f"write --{positive.name} false"
    if name in FORMER and "megatron_config" in known:
        return FORMER[name]
    if suggestion := near(name, known):
        return f"did you mean --{suggestion}?"
    return f"see swiftlite {command} --help"
