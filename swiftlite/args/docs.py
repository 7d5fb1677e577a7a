"""Read titles, types, defaults and docstrings of options from the argument classes, for `--help` and docs/options.

Python does not store the string under a field, so these strings are read from the class's source file with `ast`.
"""

import ast
import dataclasses
import inspect
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Choices = Mapping[str, Sequence[str]]
"""Allowed values of options that the class does not restrict, such as names of engines, by option name."""


@dataclass(frozen=True)
class Option:
    """One field of an argument class."""

    name: str
    type: Any
    default: Any
    doc: str
    owner: str
    """Name of the class that declares the field."""


def unsupported(args_class: type) -> Mapping[str, str]:
    """Return the fields of a class that the training command does not have as options, with the reasons."""
    return getattr(args_class, "UNSUPPORTED", {})


def options(args_class: type, choices: Choices | None = None, *, with_unsupported: bool = False) -> dict[str, Option]:
    """Return the options of a command or of a group by name, in the order of `--help`.

    Args:
        with_unsupported: whether to include the fields in `unsupported`.
    """
    types = typing.get_type_hints(args_class)
    for name, values in (choices or {}).items():
        kind: Any = Literal[tuple(values)]
        if types[name] == str | None:
            kind = kind | None
        types[name] = kind
    owners = {}
    for owner in reversed(args_class.__mro__):
        owners |= dict.fromkeys(inspect.get_annotations(owner), owner)
    found = {}
    for field in dataclasses.fields(args_class):
        if field.name in unsupported(args_class) and not with_unsupported:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        owner = owners[field.name]
        doc = _docstrings(owner.__module__)[owner.__name__].get(field.name, "")
        found[field.name] = Option(field.name, types[field.name], default, doc, owner.__name__)
    return found


def groups(args_class: type, choices: Choices | None = None) -> dict[str, list[Option]]:
    """Return the options by the title of the class that declares them; "Options" for the command's own class."""
    titles = {owner.__name__: title(owner) for owner in args_class.__mro__[:-1]} | {args_class.__name__: "Options"}
    found: dict[str, list[Option]] = {}
    for option in options(args_class, choices).values():
        found.setdefault(titles[option.owner], []).append(option)
    return found


def title(args_class: type) -> str:
    """Return the class's docstring: the title of a group, or the description of a command."""
    return _docstrings(args_class.__module__)[args_class.__name__].get("", "")


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the strings under fields by class name and field name; the docstring of a class has the field name ""."""
    source = sys.modules[module].__file__
    assert source is not None, f"{module} has no source file"
    found = {}
    for node in ast.parse(Path(source).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        docs = found[node.name] = {"": ast.get_docstring(node) or ""}
        for field, below in zip(node.body, node.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[field.target.id] = " ".join(text.split())
    return found
