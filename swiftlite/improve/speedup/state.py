"""Store the progress of `speedup` in speedup.json of its output directory.

If the same command runs again, it resumes from this progress.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from swiftlite.improve.resumable import Resumable


@dataclass
class Progress(Resumable):
    """Decisions and measurements of the completed steps.

    Attributes:
        rounds: number of prompts of each round.
        acceptance: accepted drafts per position on the held-out prompts, by name of the heads: "model" for the heads of
            --model, "round-1" for those of the first round.
        candidate: accepted drafts per position of another drafter than that of the rounds; empty without one.
        candidate_rounds: number of rounds on whose answers it was trained.
        preparation: seconds before the first step of each attempt, such as those of the conversion of a GGUF file.
    """

    FILE: ClassVar[str] = "speedup.json"
    rounds: list[int] = field(default_factory=list)
    acceptance: dict[str, list[float]] = field(default_factory=dict)
    candidate: list[float] = field(default_factory=list)
    candidate_rounds: int = 0
    preparation: float = 0.0

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
