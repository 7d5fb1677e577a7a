"""Values of options from text and from files, and back: one conversion for flags, YAML, JSON and a run's args.json."""

import dataclasses
import difflib
import json
import shlex
import types
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from swiftlite.args.docs import Choices, Option, options
from swiftlite.atomic import atomic_write
from swiftlite.errors import OptionError, UserError, clip
from swiftlite.json_file import MAX_DEPTH, parse_json

COMMAND_KEY = "command"
"""Key of a run's args.json that says whose options these are; no option has this name."""
Args = TypeVar("Args")
Problem = tuple[str, str]

# Names that people bring from other trainers, where spelling alone would not lead to ours.
_ELSEWHERE = {
    "batch_size": "global_batch_size",
    "eval_interval": "eval_steps",
    "gradient_accumulation_steps": "global_batch_size",
    "learning_rate": "lr",
    "load": "model",
    "max_epochs": "num_train_epochs",
    "max_steps": "train_iters",
    "model_name_or_path": "model",
    "num_epochs": "num_train_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "save": "output_dir",
    "save_interval": "save_steps",
    "tp": "tensor_model_parallel_size",
    "warmup_ratio": "lr_warmup_fraction",
}


def near(word: str, words: Collection[str]) -> str:
    """The one of `words` that `word` was probably meant to be, or ""."""
    spellings = {name: ours for name, ours in _ELSEWHERE.items() if ours in set(words)} | {ours: ours for ours in words}
    if word in spellings:
        return spellings[word]
    return next((spellings[name] for name in difflib.get_close_matches(word, spellings, n=1)), "")


def split_type(kind: Any) -> tuple[Any, bool]:
    """The type without its None, and whether None was there."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        inner = [arm for arm in typing.get_args(kind) if arm is not type(None)]
        assert len(inner) == 1, f"an option is one type or None, not {kind}"
        return inner[0], True
    return kind, False


# What an option of each type takes, in the words of its problem.
_TAKES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list[str]: "one or more names",
    dict[str, Any]: "a JSON object",
}


def convert(option: Option, value: Any) -> Any:
    """Convert a value to the option's type. The rules check the bounds of numbers.

    Args:
        value: a string from the command line (a list of strings for a list), or a value from a YAML or JSON file.

    Raises:
        UserError: the value is invalid. The problem is a phrase to follow the option's name, which the caller adds.
    """
    kind, may_be_none = split_type(option.type)
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    if isinstance(value, str) and value in choices:  # "none" may be one of them
        return value
    empty = value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    if empty and may_be_none:
        return None
    if choices:
        suggestion = near(str(value), choices)
        hint = f"did you mean {suggestion}?" if suggestion else f"for example --{option.name} {choices[0]}"
        raise UserError(f"takes {' or '.join(choices)}, not {_show(value)}", hint)
    if typing.get_origin(kind) is list and (empty or value in (["none"], ["null"])):
        return []
    if kind in (list[int], list[float]):
        (number_kind,) = typing.get_args(kind)
        return [_validated(number_kind, number) for number in _numbers(value)]
    if kind == list[str]:
        return _validated(kind, [value] if isinstance(value, str) else value)
    if typing.get_origin(kind) is dict:
        example = f"""for example --{option.name} '{{"key": 1}}'"""
        return _as_json(_validated(kind, _from_json(value, example), example), example)
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return _validated(kind, value, "put it in quotes" if kind is str and value is not None else "")


def _validated(kind: Any, value: Any, hint: str = "") -> Any:
    """The value in the type. Only a number may come as text; pydantic would also take 2.0 for an int, or 1 for true.

    Raises:
        UserError: it is of another type.
    """
    from pydantic import TypeAdapter, ValidationError

    is_number_as_text = kind in (int, float) and isinstance(value, str)
    try:
        valid = TypeAdapter(kind).validate_python(value, strict=not is_number_as_text)
    except ValidationError:
        raise UserError(f"takes {_TAKES[kind]}, not {_show(value)}", hint) from None
    if kind is int and abs(valid) >= 2**63:  # no arithmetic with floats would take it
        raise UserError(f"takes {_TAKES[kind]} below 2^63, not {_show(value)}")
    return valid


def _show(value: Any) -> str:
    return "null" if value is None else clip(repr(value), 200)


def _numbers(value: Any) -> Iterator[Any]:
    """Single numbers: `0,1,2` and `0 1 2` from the command line are the same; a file may hold numbers."""
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, str):
            yield from filter(None, entry.split(","))
        else:
            yield entry


def _from_json(value: Any, example: str) -> Any:
    """The content of JSON text; anything but text as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except json.JSONDecodeError as error:
        raise UserError(f"takes JSON; at character {error.pos + 1} of {_show(value)}: {error.msg}", example) from None


def _as_json(value: Any, example: str) -> Any:
    """A value that args.json can hold: YAML has dates, sets and bytes as well."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise UserError(f"takes a JSON object: {error}", example) from None
    return value


def read_file(path: str) -> dict[str, tuple[Any, str]]:
    """A YAML or JSON file of options: name -> (value, "file:line", or "file" for JSON).

    Raises:
        UserError: missing, not parseable, or not a mapping; exit code 2.
    """
    file = Path(path)
    if not file.is_file():
        what = "is a directory" if file.is_dir() else "does not exist"
        raise UserError(f"the configuration file {path} {what}", "give a YAML or JSON file, or start with a --flag", 2)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start}", exit_code=2) from None
    if file.suffix == ".json":
        return _read_json(path, text)
    if file.suffix in (".yaml", ".yml"):
        return _read_yaml(path, text)
    raise UserError(f"the configuration file {path} is neither .yaml, .yml nor .json", "rename it", 2)


def _read_json(path: str, text: str) -> dict[str, tuple[Any, str]]:
    try:
        content = parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}", exit_code=2) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object", 'write {"option": value, ...}', 2)
    return {key: (value, path) for key, value in content.items()}


def _read_yaml(path: str, text: str) -> dict[str, tuple[Any, str]]:
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML follows YAML 1.1, where 1e-5 is a string; in a training configuration it is a learning rate."""

        def fetch_flow_collection_start(self, TokenClass: Any) -> None:
            if self.flow_level >= MAX_DEPTH:  # its time goes with the square of the depth
                raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=self.get_mark())
            super().fetch_flow_collection_start(TokenClass)

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    try:
        node = yaml.compose(text, Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not YAML: {error.problem}", exit_code=2) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{path}:{line}: not YAML: {error.reason}: #x{error.character:04x}", exit_code=2) from None
    except RecursionError:
        raise UserError(f"{path}: not YAML: nested too deeply", exit_code=2) from None
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path} holds no mapping", "write one `option: value` per line", 2)
    entries: dict[str, tuple[Any, str]] = {}
    for key_node, value_node in node.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"{where}: expected an option name, found a list or a mapping", "write `option: value`", 2)
        key = key_node.value
        if key in entries:
            raise UserError(f"{where}: {key} was given before, at {entries[key][1]}", "keep one of the two", 2)
        entries[key] = (_construct(Loader, value_node, where), where)
    return entries


def _construct(loader_class: Any, node: Any, where: str) -> Any:
    """The value of a YAML node.

    Raises:
        UserError: it has none; whatever PyYAML raised.
    """
    import yaml

    if _is_larger(node, _MAX_VALUES):
        raise UserError(
            f"{where}: its aliases expand to more than {_MAX_VALUES} values", "write the values without aliases", 2
        )
    loader = loader_class("")
    try:
        value = loader.construct_document(node)
        repr(value)  # a number of 5000 digits, which may come as 0x..., has none
        return value
    except yaml.MarkedYAMLError as error:
        line = f"{where.rpartition(':')[0]}:{error.problem_mark.line + 1}" if error.problem_mark else where
        raise UserError(f"{line}: not YAML: {error.problem}", exit_code=2) from None
    except Exception as error:  # `!!float ""` is an IndexError, `!!bool x` a KeyError
        raise UserError(f"{where}: not YAML: {type(error).__name__}: {error}", exit_code=2) from None
    finally:
        loader.dispose()


_MAX_VALUES = 10_000
"""In the value of one option, with aliases written out."""


def _is_larger(node: Any, limit: int) -> bool:
    """Whether a YAML node holds more nodes than that, each counted as often as it is named; so a loop does."""
    waiting = [node]
    for _ in range(limit):
        if not waiting:
            return False
        value = waiting.pop().value
        if isinstance(value, list):
            for entry in value:
                waiting += entry if isinstance(entry, tuple) else [entry]
    return bool(waiting)


def values_from_file(
    args_class: type, path: str, choices: Choices | None = None, command: str = ""
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the file's options as values of their types, and what is wrong with the others.

    Args:
        command: words of the command that reads it; a file of another command is a problem. "": any command's.
    """
    known = options(args_class, choices)
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    entries = read_file(path)
    written_for, where = entries.pop(COMMAND_KEY, (command, path))
    if not isinstance(written_for, str):
        return {}, [(f"{where}: {COMMAND_KEY} takes text, not {_show(written_for)}", "write a command's words")]
    if command and written_for != command:  # its options would all be unknown
        hint = f"swiftlite {written_for} {shlex.quote(path)}"
        return {}, [(f"{where}: these are options of {written_for}, not of {command}", hint)]
    for key, (value, where) in entries.items():
        name = str(key).replace("-", "_")
        if name not in known:
            suggestion = near(name, known)
            hint = f"did you mean {suggestion}?" if suggestion else ""
            problems.append((f"{where}: {key} is not an option of this command", hint))
            continue
        try:
            values[name] = convert(known[name], value)
        except UserError as error:
            problems.append((f"{where}: {key} {error.problem}", error.hint))
    return values, problems


def from_config(args_class: type[Args], path: str | Path) -> Args:
    """The arguments that a file holds; options that it leaves out have their defaults.

    Raises:
        OptionError: unknown options and values of the wrong type, all together.
    """
    values, problems = values_from_file(args_class, str(path))
    if problems:
        raise OptionError(problems)
    return args_class(**values)


def write_config(args: Any, path: str | Path, command: str = "") -> None:
    """Write the arguments as a JSON file that runs again: `swiftlite COMMAND FILE`.

    Args:
        command: words of the command, which the file keeps; "" leaves them out.
    """
    entries = {COMMAND_KEY: command} if command else {}
    content = json.dumps(entries | dataclasses.asdict(args), indent=2, ensure_ascii=False) + "\n"
    atomic_write(Path(path), content.encode())
