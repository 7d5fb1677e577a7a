"""Settings that decide what the conversations of `--self_prompts` are about.

A large model follows a system prompt that names a topic. A small model follows only the first words of its own turn:
an opening such as "Translate into French:".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from swiftlite.args.commands import RegenerateArgs
from swiftlite.base.errors import UserError

BUILTIN = "builtin"
"""Value of --openings that selects the file of this package."""


@dataclass(frozen=True)
class Steering:
    """Settings that decide what the conversations are about; without any, the model chooses.

    Attributes:
        system: system prompt of all conversations.
        topics: topics, given to the conversations one after another and repeated, in the system prompt of user turns.
        openings: first words, given to the conversations one after another and repeated; the model completes them.
        openings_share: share of the conversations that start with an opening.
    """

    system: str | None = None
    topics: Sequence[str] = ()
    openings: Sequence[str] = ()
    openings_share: float = 1.0

    @property
    def period(self) -> int:
        """Number of conversations after which every topic and every opening was used at least once; at least 1."""
        number = max(1, len(self.topics))
        if self.openings and self.openings_share:
            number = max(number, math.ceil(len(self.openings) / self.openings_share))
        return number

    def user_system(self, conversation: int) -> str | None:
        """Return the system prompt for generating the user turns of a conversation; None if no system prompt is set."""
        if not self.topics:
            return self.system
        topic = self.topics[conversation % len(self.topics)]
        return f"{self.system or ''}\n\nThe next request of the user is about this topic: {topic}".lstrip()

    def opening(self, conversation: int) -> str:
        """Return the first words of a conversation; empty if the conversation starts without an opening.

        Conversations with an opening are spread evenly: with a share of 0.5, every second conversation has an opening.
        """
        number = math.floor(conversation * self.openings_share)
        is_steered = math.floor((conversation + 1) * self.openings_share) > number
        if not self.openings or not is_steered:
            return ""
        return self.openings[number % len(self.openings)]


def read_steering(args: RegenerateArgs) -> Steering:
    """Read the files of --topics and --openings.

    Raises:
        UserError: a file cannot be read, or has no line.
    """
    topics: list[str] = []
    openings: list[str] = []
    if args.topics is not None:
        topics = _read_lines("--topics", args.topics, "topic")
    if args.openings == BUILTIN:
        packaged = resources.files("swiftlite.improve.regenerate") / "openings.txt"
        openings = packaged.read_text(encoding="utf-8").splitlines()
    elif args.openings is not None:
        openings = _read_lines("--openings", args.openings, "opening")
    return Steering(args.system, topics, openings, args.openings_share)


def _read_lines(option: str, path: str, kind: str) -> list[str]:
    """Return the lines of a file that are not empty."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{option} {path} cannot be read: {error}", f"give a text file with one {kind} per line"
        ) from None
    stripped = [line.strip() for line in lines]
    found = [line for line in stripped if line]
    if not found:
        raise UserError(f"{option} {path} has no {kind}", f"write one {kind} per line")
    return found
