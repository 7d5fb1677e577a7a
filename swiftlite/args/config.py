"""Values of options from text and from files, and back: one conversion for flags, YAML, JSON and a run's args.json."""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from swiftlite.args.docs import Choices, Option, options
from swiftlite.errors import OptionError, UserError

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


def convert(option: Option, value: Any) -> Any:
    """A value of the option's type.

    Args:
        value: a string from the command line (a list of strings for a list), or what a YAML or JSON file held.

    Raises:
        UserError: the problem begins with what the option takes; the caller puts the option's name before it.
    """
    kind, may_be_none = split_type(option.type)
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    if isinstance(value, str) and value in choices:  # "none" may be one of them
        return value
    empty = value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    if empty and may_be_none:
        return None
    if typing.get_origin(kind) is list:
        value = [] if empty or value in (["none"], ["null"]) else value
        return _to_ints(value) if typing.get_args(kind) == (int,) else _to_list(value)
    if choices:
        suggestion = near(str(value), choices)
        raise UserError(
            f"takes {' or '.join(choices)}, not {_show(value)}", f"did you mean {suggestion}?" if suggestion else ""
        )
    if typing.get_origin(kind) is dict:
        return _to_dict(option.name, value)
    return {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}[kind](value)


def _show(value: Any) -> str:
    return "null" if value is None else repr(value)


def _to_list(value: Any) -> list[str]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise UserError(f"takes one or more names, not {_show(value)}")
    return list(value)


def _to_ints(value: Any) -> list[int]:
    """`0,1,2` and `0 1 2` from the command line are the same; a file may hold numbers."""
    entries = value if isinstance(value, list) else [value]
    return [
        _to_int(part)
        for entry in entries
        for part in (filter(None, entry.split(",")) if isinstance(entry, str) else [entry])
    ]


def _to_dict(name: str, value: Any) -> dict[str, Any]:
    example = f"""for example --{name} '{{"key": 1}}'"""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"takes JSON; at character {error.pos + 1} of {value!r}: {error.msg}", example) from None
    if not isinstance(value, dict):
        raise UserError(f"takes a JSON object, not {_show(value)}", example)
    return value


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise UserError(f"takes true or false, not {_show(value)}")


def _to_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        if isinstance(value, str):
            return int(value)
    except ValueError:
        pass
    raise UserError(f"takes a whole number, not {_show(value)}")


def _to_float(value: Any) -> float:
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return float(value)
    except ValueError:
        pass
    raise UserError(f"takes a number, not {_show(value)}")


def _to_str(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise UserError(f"takes text, not {_show(value)}", "put it in quotes" if value is not None else "")


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
        content = json.loads(text)
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

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{path} holds no mapping", "write one `option: value` per line", 2)
        entries = {}
        for key_node, value_node in node.value:
            key, where = loader.construct_object(key_node, deep=True), f"{path}:{key_node.start_mark.line + 1}"
            if key in entries:
                raise UserError(f"{where}: {key} was given before, at {entries[key][1]}", "keep one of the two", 2)
            entries[key] = (loader.construct_object(value_node, deep=True), where)
        return entries
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not YAML: {error.problem}", exit_code=2) from None
    finally:
        loader.dispose()


def values_from_file(
    args_class: type, path: str, choices: Choices | None = None
) -> tuple[dict[str, Any], list[Problem]]:
    """The file's options as values of their types, and what is wrong with the others."""
    known, values, problems = options(args_class, choices), {}, []
    for key, (value, where) in read_file(path).items():
        name = str(key).replace("-", "_")
        if name not in known:
            suggestion = near(name, known)
            hint = f"did you mean {suggestion}?" if suggestion else ""
            problems.append((f"{where}: {key} is no option of this command", hint))
            continue
        try:
            values[name] = convert(known[name], value)
        except UserError as error:
            problems.append((f"{where}: {key} {error.problem}", error.hint))
    return values, problems


def to_config(args: Any) -> dict[str, Any]:
    """Every option with its value, ready for JSON or YAML; `from_config` is the inverse."""
    return dataclasses.asdict(args)


def from_config(args_class: type[Args], path: str | Path) -> Args:
    """The arguments that a file holds; options that it leaves out have their defaults.

    Raises:
        OptionError: unknown options and values of the wrong type, all together.
    """
    values, problems = values_from_file(args_class, str(path))
    if problems:
        raise OptionError(problems)
    return args_class(**values)


def write_config(args: Any, path: str | Path) -> None:
    """Write the arguments as a JSON file that runs again: `swiftlite COMMAND FILE`."""
    Path(path).write_text(json.dumps(to_config(args), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
