"""The command line of an engine's server, for `deploy` and `bench`."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swiftlite.atomic import atomic_write, check_writable


@dataclass(frozen=True)
class ServerCommand:
    """The command of a server.

    Attributes:
        words: the program and its arguments.
        variables: additional environment variables.
        files: files that must be written before the program starts: text by path.
    """

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)

    def shell_line(self) -> str:
        """Return one line for a shell that writes the files and then runs the program."""
        steps = [f"echo {shlex.quote(text)} > {shlex.quote(str(path))}" for path, text in self.files.items()]
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return " && ".join([*steps, shlex.join([*variables, *self.words])])

    def write_files(self, flag: str) -> None:
        """Write the files.

        Args:
            flag: option for which the files are written, named in errors.

        Raises:
            UserError: a file cannot be written.
        """
        for path, text in self.files.items():
            check_writable(flag, path.parent)
            atomic_write(path, f"{text}\n".encode())


def flags(options: Mapping[str, Any]) -> list[str]:
    """Convert an engine's keyword arguments to command-line flags; None omits a flag, dicts become JSON."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif value is not None:
            words += [flag, str(value)]
    return words
