"""Format options as a command line. This is the inverse of `cli/parse.py`."""

import json
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from swiftlite.args.docs import options
from swiftlite.base.redact import redact_text


def shell_line(value: Any) -> str:
    """Return the value of an option as it is typed after the flag."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return shlex.quote(json.dumps(value))
    if value is None:
        return "(unset)"
    return str(value)


def typed(name: str, value: Any) -> str:
    """Return an option with its value as it is typed in a shell."""
    text = shlex.quote(value) if isinstance(value, str) else shell_line(value)
    return f"--{name} {text}"


def command_line(command: str, args_class: type, values: Mapping[str, Any], always: Collection[str] = ()) -> str:
    """Return the command line that sets these options, with *** for keys and tokens.

    Args:
        command: command words, such as "megatron sft".
        values: values by option name. Default values, and names that are not options of the class, are omitted.
        always: options to include even if they have their default values.
    """
    words = ["swiftlite", *command.split()]
    for name, option in options(args_class).items():
        value = values.get(name, option.default)
        if value == option.default and name not in always:
            continue
        words.append(f"--{name}")
        if isinstance(value, dict):
            words.append(json.dumps(value))
        elif isinstance(value, list):
            words += map(str, value or ["none"])
        else:
            words.append(shell_line(value))
    return redact_text(shlex.join(words))
