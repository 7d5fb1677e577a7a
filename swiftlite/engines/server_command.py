"""The command line of an engine's own server, for `deploy` and `bench`."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ServerCommand:
    """The command of a server.

    Attributes:
        words: the program and its arguments.
        variables: additional environment variables.
    """

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)

    def shell_line(self) -> str:
        """The command as a line for a shell."""
        return shlex.join([*(f"{name}={value}" for name, value in self.variables.items()), *self.words])


def flags(options: Mapping[str, Any]) -> list[str]:
    """Command-line flags of an engine from its keyword arguments; None leaves one out, dicts become JSON."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif value is not None:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
