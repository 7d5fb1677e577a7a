"""Convert values of options from text and files, and back.

Flags, YAML, JSON and a run's args.json use the same functions.
"""

import dataclasses
import difflib
import json
import shlex
import types
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from swiftlite.args.docs import Choices, Option, options, unsupported
from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import OptionError, UserError, clip
from swiftlite.base.json_file import MAX_DEPTH, parse_json, repeated_keys

COMMAND_KEY = "command"
"""Key of a run's args.json that contains the words of the run's command. No option has this name."""
Args = TypeVar("Args")
Problem = tuple[str, str]

# Option names of other trainers, and the corresponding options of swiftlite.
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
    "bucket_size": "ddp_bucket_size",
    "pad_buckets_for_high_nccl_busbw": "megatron_config",
    "per_device_train_batch_size": "micro_batch_size",
    "profile": "profile_steps",
    "profile_step_end": "profile_steps",
    "profile_step_start": "profile_steps",
    "record_memory_history": "profile_kind",
    "use_pytorch_profiler": "profile_kind",
    "save": "output_dir",
    "save_interval": "save_steps",
    "tp": "tensor_model_parallel_size",
    "warmup_ratio": "lr_warmup_fraction",
}

FORMER = {
    "ddp_pad_buckets_for_high_nccl_busbw": (
        """remove it; for true, use --megatron_config '{"pad_buckets_for_high_nccl_busbw": true}'"""
    ),
    "distribute_saved_activations": "remove it; for true, use --sequence_parallel true",
    "nccl_ub": """remove it; for true, use --megatron_config '{"nccl_ub": true}'""",
}
"""Options of earlier releases, whose default was false, and what replaces them. args.json of earlier runs has them."""


def near(word: str, words: Collection[str]) -> str:
    """Return the element of `words` that is most similar to `word`; empty if no element is similar."""
    spellings = {name: ours for name, ours in _ELSEWHERE.items() if ours in set(words)} | {ours: ours for ours in words}
    if word in spellings:
        return spellings[word]
    return next((spellings[name] for name in difflib.get_close_matches(word, spellings, n=1)), "")


def split_type(kind: Any) -> tuple[Any, bool]:
    """Return a type without None, and whether the type included None."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        inner = [arm for arm in typing.get_args(kind) if arm is not type(None)]
        assert len(inner) == 1, f"an option is one type or None, not {kind}"
        return inner[0], True
    return kind, False


# Description of each type in messages.
_EXPECTED: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list[str]: "one or more texts",
    dict[str, Any]: "a JSON object",
    dict[str, int]: "a JSON object of integers",
    dict[str, str]: "a JSON object of texts",
}


def convert(option: Option, value: Any) -> Any:
    """Convert a value to the option's type. The rules check the bounds of numbers.

    Args:
        value: a string from the command line (for a list, a list of strings), or a value from a YAML or JSON file.

    Raises:
        UserError: the value is invalid. The caller adds "invalid value for NAME: " in front of the problem.
    """
    kind, may_be_none = split_type(option.type)
    choices: tuple[str, ...] = ()
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
    if isinstance(value, str) and value in choices:  # "none" can be one of them
        return value
    empty = value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    if empty and may_be_none:
        return None
    if choices:
        hint = f"use --{option.name} {choices[0]}"
        same = (choice for choice in choices if choice.lower() == str(value).lower())
        if suggestion := next(same, near(str(value), choices)):
            hint = f"did you mean {suggestion}?"
        raise UserError(f"expected {' or '.join(choices)}, not {_show(value)}", hint)
    if typing.get_origin(kind) is list and (empty or value in (["none"], ["null"])):
        return []
    if kind in (list[int], list[float]):
        return _validated_numbers(kind, value)
    if kind == list[str]:
        if isinstance(value, str):
            value = [value]
        return _validated(kind, value)
    if typing.get_origin(kind) is dict:
        example = f"""for example --{option.name} '{{"key": 1}}'"""
        return _as_json(_validated(kind, _from_json(value, example), example), example)
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    hint = ""
    if kind is str and value is not None:
        hint = "put it in quotes"
    return _validated(kind, value, hint)


def _validated(kind: Any, value: Any, hint: str = "") -> Any:
    """Check that a value has a type, and return it.

    Only numbers may be strings; pydantic also accepts 2.0 for int and 1 for true.

    Raises:
        UserError: the value has a different type.
    """
    from pydantic import TypeAdapter, ValidationError

    is_number_as_text = kind in (int, float) and isinstance(value, str)
    try:
        valid = TypeAdapter(kind).validate_python(value, strict=not is_number_as_text)
    except ValidationError:
        raise UserError(f"expected {_EXPECTED[kind]}, not {_show(value)}", hint) from None
    if kind is int and abs(valid) >= 2**63:  # conversion to float could overflow
        raise UserError(f"expected {_EXPECTED[kind]} below 2^63, not {_show(value)}")
    return valid


def _validated_numbers(kind: Any, value: Any) -> list[Any]:
    """Return a list of numbers.

    Raises:
        UserError: some values are not numbers; the error lists them.
    """
    (number_kind,) = typing.get_args(kind)
    numbers, problems = [], []
    for number in _numbers(value):
        try:
            numbers.append(_validated(number_kind, number))
        except UserError as error:
            problems.append(error.problem)
    if problems:
        raise UserError("; ".join(problems))
    return numbers


def _show(value: Any) -> str:
    if value is None:
        return "null"
    return clip(repr(value), 200)


def _numbers(value: Any) -> Iterator[Any]:
    """Yield single numbers. From the command line, `0,1,2` and `0 1 2` are equivalent; files contain numbers."""
    if not isinstance(value, list):
        value = [value]
    for entry in value:
        if isinstance(entry, str):
            yield from filter(None, entry.split(","))
        else:
            yield entry


def _from_json(value: Any, example: str) -> Any:
    """Return the content of JSON text, or of the JSON file that the text names; return other values unchanged."""
    if not isinstance(value, str):
        return value
    if value.endswith(".json"):
        return _from_json_file(value, example)
    try:
        content = parse_json(value)
    except json.JSONDecodeError as error:
        problem = f"expected JSON; at character {error.pos + 1} of {_show(value)}: {error.msg}"
        raise UserError(problem, example) from None
    _check_keys(value, _show(value))
    return content


def _from_json_file(path: str, example: str) -> Any:
    """Return the content of a JSON file with the value of one option.

    Raises:
        UserError: the file is missing or invalid.
    """
    file = Path(path)
    if not file.is_file():
        state = "is a directory" if file.is_dir() else "does not exist"
        raise UserError(f"the file {path} {state}", f"give a JSON file, or the JSON itself: {example}")
    content = _parsed(path, _text_of(file))
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object", 'write {"name": value, ...}')
    return content


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not valid UTF-8: byte {error.start}", "save it as UTF-8", 2) from None


def _parsed(path: str, text: str, other_hint: str = "") -> Any:
    """Return the content of a JSON file.

    Args:
        other_hint: what to do instead of fixing invalid JSON.

    Raises:
        UserError: the text is not JSON, or an object has a key twice.
    """
    try:
        content = parse_json(text)
    except json.JSONDecodeError as error:
        problem = f"{path}:{error.lineno}: invalid JSON: {error.msg}"
        raise UserError(problem, f"fix it at column {error.colno}{other_hint}", 2) from None
    _check_keys(text, path)
    return content


def _check_keys(text: str, where: str) -> None:
    """Raise UserError if an object in a JSON text has a key twice. Python would ignore the first value."""
    if keys := repeated_keys(text):
        raise UserError(f"{where}: {json.dumps(keys[0])} is set twice", "remove one of the two", 2)


def _as_json(value: Any, example: str) -> Any:
    """Return a value that JSON can represent; YAML also has dates, sets and bytes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise UserError(f"expected a JSON object: {error}", example) from None
    return value


def read_file(path: str) -> dict[str, tuple[Any, str]]:
    """Read a YAML or JSON file of options.

    Returns:
        By option name, the value and its place: "file:line", or "file" for JSON.

    Raises:
        UserError: the file is missing, invalid, or not a mapping; exit code 2.
    """
    file = Path(path)
    if file.is_dir():
        raise UserError(f"the configuration file {path} is a directory", "give a YAML or JSON file", 2)
    if not file.is_file():
        raise UserError(f"the configuration file {path} does not exist", "give a YAML or JSON file, or a --option", 2)
    text = _text_of(file)
    if file.suffix == ".json":
        return _read_json(path, text)
    if file.suffix in (".yaml", ".yml"):
        return _read_yaml(path, text)
    raise UserError(f"the configuration file {path} must end in .yaml, .yml or .json", "rename it", 2)


def _read_json(path: str, text: str) -> dict[str, tuple[Any, str]]:
    content = _parsed(path, text, ", or use a .yaml file")
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object", 'write {"option": value, ...}', 2)
    return {key: (value, path) for key, value in content.items()}


def _read_yaml(path: str, text: str) -> dict[str, tuple[Any, str]]:
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        """A loader that reads 1e-5, such as a learning rate, as a number. PyYAML (YAML 1.1) reads it as a string."""

        def fetch_flow_collection_start(self, TokenClass: Any) -> None:
            if self.flow_level >= MAX_DEPTH:  # parsing time grows with the square of the depth
                raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=self.get_mark())
            super().fetch_flow_collection_start(TokenClass)

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    try:
        node = yaml.compose(text, Loader)
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(_marked(path, error), str(error.problem)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _not_yaml(f"{path}:{line}", f"{error.reason}: #x{error.character:04x}") from None
    except RecursionError:
        raise _not_yaml(path, "nested too deeply") from None
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path} is not a mapping", _WRITE_YAML, 2)
    entries: dict[str, tuple[Any, str]] = {}
    for key_node, value_node in node.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise UserError(f"{where}: expected an option name, not a list or a mapping", _WRITE_YAML, 2)
        key = key_node.value
        if key in entries:
            raise UserError(f"{where}: {key} is already set at {entries[key][1]}", "remove one of the two", 2)
        entries[key] = (_construct(Loader, value_node, where), where)
    return entries


_WRITE_YAML = "write one `option: value` per line"


def _not_yaml(where: str, reason: str) -> UserError:
    return UserError(f"{where}: invalid YAML: {reason}", _WRITE_YAML, 2)


def _marked(path: str, error: Any) -> str:
    """Return the path with the line of a YAML error, if the error has a line."""
    if error.problem_mark is None:
        return path
    return f"{path}:{error.problem_mark.line + 1}"


def _construct(loader_class: Any, node: Any, where: str) -> Any:
    """Return the value of a YAML node.

    Raises:
        UserError: the node has no valid value. This error replaces exceptions of PyYAML.
    """
    import yaml

    if _is_larger(node, _MAX_VALUES):
        raise UserError(
            f"{where}: its aliases expand to more than {_MAX_VALUES} values", "write the values without aliases", 2
        )
    loader = loader_class("")
    try:
        value = loader.construct_document(node)
        repr(value)  # raises for a number of 5000 digits, such as 0x...
        return value
    except yaml.MarkedYAMLError as error:
        if error.problem_mark:
            where = _marked(where.rpartition(":")[0], error)
        raise _not_yaml(where, str(error.problem)) from None
    except Exception as error:  # `!!float ""` is an IndexError, `!!bool x` a KeyError
        raise _not_yaml(where, f"{type(error).__name__}: {error}") from None
    finally:
        loader.dispose()


_MAX_VALUES = 10_000
"""Maximum number of nodes in the value of one option, with aliases expanded."""


def _is_larger(node: Any, limit: int) -> bool:
    """Return whether a YAML node, with aliases expanded, contains more than `limit` nodes.

    Recursive nodes always do.
    """
    waiting = [node]
    for _ in range(limit):
        if not waiting:
            return False
        value = waiting.pop().value
        if isinstance(value, list):
            for entry in value:
                if isinstance(entry, tuple):  # key and value of a mapping
                    waiting += entry
                else:
                    waiting.append(entry)
    return bool(waiting)


def values_from_file(
    args_class: type, path: str, choices: Choices | None = None, command: str = ""
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the file's valid options, converted to their types, and the problems of invalid ones.

    Args:
        command: words of the command that reads the file; a file of another command is a problem. If empty, files of
            all commands are accepted.
    """
    known, without = options(args_class, choices, with_unsupported=True), unsupported(args_class)
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    entries = read_file(path)
    written_for, where = entries.pop(COMMAND_KEY, (command, path))
    if not isinstance(written_for, str):
        problem = f"{where}: invalid value for {COMMAND_KEY}: expected text, not {_show(written_for)}"
        return {}, [(problem, f"write the words of a command, or remove {COMMAND_KEY}")]
    if command and written_for != command:  # its options would all be unknown
        hint = f"run swiftlite {written_for} {shlex.quote(path)}"
        return {}, [(f"{where}: the file has options of {written_for}, not of {command}", hint)]
    for key, (value, where) in entries.items():
        name = str(key).replace("-", "_")
        if name in FORMER and (value is False or not command):
            continue  # none of them changed results, so that runs with another value can be read as well
        if name not in known:
            hint = _suggestion(name, options(args_class, choices), command)
            problems.append((f"{where}: unknown option {key}", hint))
            continue
        try:
            values[name] = convert(known[name], value)
        except UserError as error:
            problems.append((f"{where}: invalid value for {key}: {error.problem}", error.hint))
            continue
        if name in without and values[name] != known[name].default:  # args.json of a run has the defaults
            problem, _ = not_supported(name, command or "this command", without[name])
            problems.append((f"{where}: {problem}", f"remove {key}"))
    return values, problems


def not_supported(name: str, command: str, why: str) -> Problem:
    """Return the problem of an option in `docs.unsupported`."""
    return f"--{name} is not supported by {command}: {why}", f"remove --{name}"


def _suggestion(name: str, known: Collection[str], command: str) -> str:
    if name in FORMER and "megatron_config" in known:
        return FORMER[name]
    if suggestion := near(name, known):
        return f"did you mean {suggestion}?"
    if command:
        return f"remove it, or see swiftlite {command} --help"
    return "remove it"


def from_config(args_class: type[Args], path: str | Path) -> Args:
    """Read arguments from a file; missing options have their defaults.

    Raises:
        OptionError: there are unknown options or invalid values; the error lists all of them.
    """
    values, problems = values_from_file(args_class, str(path))
    if problems:
        raise OptionError(problems)
    return args_class(**values)


def write_config(args: Any, path: str | Path, command: str = "") -> None:
    """Write the arguments as a JSON file, with which `swiftlite COMMAND FILE` runs the command again.

    Args:
        command: words of the command, which are recorded in the file; if empty, no command is recorded.
    """
    entries = dataclasses.asdict(args)
    if command:
        entries = {COMMAND_KEY: command} | entries
    content = json.dumps(entries, indent=2, ensure_ascii=False) + "\n"
    atomic_write(Path(path), content.encode())
