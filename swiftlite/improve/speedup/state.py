"""Store the progress of `speedup` in speedup.json of its output directory.

If the same command runs again, it resumes from this progress.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json

FILE = "speedup.json"
MODEL = "model"
"""Name of the heads of --model."""


@dataclass
class Progress:
    """Decisions and measurements of the completed steps.

    Attributes:
        settings: options that a resumed command must not change.
        rounds: number of prompts of each round.
        seconds: seconds of each completed step by its name, such as "round-1/answers".
        unfinished: seconds so far of each step that is running or was interrupted.
        acceptance: accepted drafts per position on the held-out prompts, by name of the heads: "model" for the heads of
            --model, "round-1" for those of the first round.
        candidate: accepted drafts per position of another drafter than that of the rounds; empty without one.
        preparation: seconds before the first step of each attempt, such as those of the conversion of a GGUF file.
    """

    settings: dict[str, Any]
    rounds: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    unfinished: dict[str, float] = field(default_factory=dict)
    acceptance: dict[str, list[float]] = field(default_factory=dict)
    candidate: list[float] = field(default_factory=list)
    preparation: float = 0.0

    @classmethod
    def read(cls, directory: Path, settings: dict[str, Any]) -> Self:
        """Read the progress of an earlier command; without one, return an empty progress.

        Raises:
            UserError: the file is damaged, or the earlier command had other settings.
        """
        path = directory / FILE
        hint = "use another --output_dir"
        if not path.exists():
            others = [path for path in directory.glob("*") if not path.name.startswith(".")]
            if others:
                raise UserError(f"--output_dir {directory} is not empty, and has no {FILE}", hint)
            return cls(settings)
        try:
            progress = TypeAdapter(cls).validate_python(read_json(path))
        except (OSError, ValueError, ValidationError):
            raise UserError(f"{path} is damaged", hint) from None
        # An option that is newer than the file had its default value.
        changed = [name for name, value in settings.items() if progress.settings.get(name, value) != value]
        if changed:
            lines = [f"--{name} was {progress.settings.get(name)}, now {settings[name]}" for name in changed]
            raise UserError(f"--output_dir {directory} has results with other settings: {'; '.join(lines)}", hint)
        return progress

    def write(self, directory: Path) -> None:
        """Write the file.

        Raises:
            UserError: the file cannot be written.
        """
        try:
            atomic_write(directory / FILE, json.dumps(asdict(self), indent=2).encode() + b"\n")
        except OSError as error:
            problem = f"--output_dir: {directory / FILE} cannot be written: {error.strerror}"
            raise UserError(problem, "free disk space and run the same command again") from None

    def repeat(self, step: str) -> None:
        """Let a complete step run again. The time of its first run still counts."""
        self.unfinished[step] = self.seconds.pop(step)

    @property
    def spent(self) -> float:
        """Seconds of all steps, including interrupted attempts, and of the preparation."""
        return self.preparation + sum(self.seconds.values()) + sum(self.unfinished.values())

    @property
    def best(self) -> str:
        """The name of the heads ("model" or "round-N") with the most accepted drafts per step; empty if no heads were
        measured.

        If several are equally good, the first one.
        """
        return max(self.acceptance, key=lambda name: sum(self.acceptance[name]), default="")
