"""Set variables of a chat template (`--chat_template_kwargs`).

The variables become a statement at the beginning of the template. Everything that renders the template, or compares
it with that of an earlier run, therefore includes them.
"""

import keyword
from collections.abc import Iterator, Mapping
from typing import Any

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that are set for each conversation."""
_CONSTANTS = ("true", "false", "none")
"""Names of Jinja's constants, besides those of Python."""


def impossible_names(kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names that cannot be variables of a template."""
    for name in kwargs:
        if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name) or name in (*RESERVED, *_CONSTANTS):
            yield name


def with_kwargs(template: str, kwargs: Mapping[str, Any]) -> str:
    """Return a template in which variables have the given values, as if they were passed to `apply_chat_template`.

    Args:
        kwargs: JSON by name. Jinja reads Python's literals.
    """
    # Not "-%}" or "%}", which would remove white space at the beginning of the template.
    statements = [f"{{% set {name} = {value!a} +%}}" for name, value in kwargs.items()]
    return "".join(statements) + template
