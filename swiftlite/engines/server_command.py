"""The command line of an engine's server, for `deploy` and `bench`."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from swiftlite.base.atomic import atomic_write, check_writable
from swiftlite.base.redact import HIDDEN, is_secret, redact
from swiftlite.runtime.environment import SAFE_PATH


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

    def with_port(self, port: int) -> Self:
        """Return the command with another port, which follows `--port`."""
        words = list(self.words)
        words[words.index("--port") + 1] = str(port)
        return replace(self, words=words)

    def shell_line(self) -> str:
        """Return one line for a shell that writes the files and then runs the program."""
        steps = [f"echo {shlex.quote(text)} > {shlex.quote(str(path))}" for path, text in self.files.items()]
        # Without SAFE_PATH, a shell in the directory of a model would let Python import the model's files.
        variables = SAFE_PATH | self.variables
        # Only the value is quoted: for a shell, a quoted assignment is the name of a program.
        assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        return " && ".join([*steps, " ".join([*assignments, shlex.join(self.words)])])

    def redacted(self) -> Self:
        """Return the command with *** for each variable and each value of a flag whose name identifies a secret."""
        words: list[str] = []
        is_hidden = False
        for word in self.words:
            is_flag = word.startswith("--")
            if is_flag:
                is_hidden = is_secret(word.removeprefix("--"), "")
            words.append(HIDDEN if is_hidden and not is_flag else word)
        return replace(self, words=words, variables=redact(self.variables))

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


def api_keys(given: Any) -> list[str]:
    """Return the keys of an engine's option `api_key`: a key, a list of keys, or None. Keys can be numbers in JSON."""
    if not isinstance(given, list):
        given = [given]
    return [str(key) for key in given if key is not None]
