"""Store the state of a command in a file of its output directory. The same command resumes from it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

from pydantic import TypeAdapter, ValidationError

from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json

MODEL = "model"
"""Name of the heads of --model."""
HINT = "use another --output_dir"


@dataclass
class Resumable:
    """State of a command, as values that JSON has.

    Attributes:
        settings: options that a resumed command must not change.
        seconds: seconds of each completed step by its name, such as "round-1/answers".
        unfinished: seconds so far of each step that is running or was interrupted.
    """

    FILE: ClassVar[str]
    settings: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    unfinished: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(
        cls, directory: Path, settings: dict[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> Self:
        """Read the state of an earlier command; without one, return the initial state.

        Args:
            defaults: values, in earlier commands, of settings that are newer than their file. A newer setting without
                one can have any value.

        Raises:
            UserError: the file is damaged, the earlier command had other settings, or the directory has other files.
        """
        path = directory / cls.FILE
        if not path.exists():
            if any(not found.name.startswith(".") for found in directory.glob("*")):
                raise UserError(f"--output_dir {directory} is not empty, and has no {cls.FILE}", HINT)
            return cls(settings)
        try:
            state = TypeAdapter(cls).validate_python(read_json(path))
        except (OSError, ValueError, ValidationError):
            raise UserError(f"{path} is damaged", HINT) from None
        before = {**settings, **defaults, **state.settings}
        changed = [name for name, value in settings.items() if before[name] != value]
        if changed:
            lines = [f"--{name} was {before[name]}, now {settings[name]}" for name in changed]
            raise UserError(f"--output_dir {directory} has results with other settings: {'; '.join(lines)}", HINT)
        return state

    def write(self, directory: Path) -> None:
        """Write the file.

        Raises:
            UserError: the file cannot be written.
        """
        write_result(directory / self.FILE, json.dumps(asdict(self), indent=2).encode() + b"\n")


def write_result(path: Path, content: bytes, note: str = "") -> None:
    """Write a file to --output_dir.

    Args:
        note: what to add to the hint of the error, such as "; all answers are stored".

    Raises:
        UserError: the file cannot be written.
    """
    try:
        atomic_write(path, content)
    except OSError as error:
        problem = f"--output_dir: {path} cannot be written: {error.strerror}"
        raise UserError(problem, f"free disk space and run the same command again{note}") from None
