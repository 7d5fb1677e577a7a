"""Store the state of `adapt` in adapt.json of its output directory. The same command resumes from it."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.log import logger
from swiftlite.improve.resumable import MODEL, Resumable

DECISIONS = "decisions.jsonl"


@dataclass(frozen=True)
class Served:
    """Drafts that a server has counted.

    Attributes:
        steps: number of steps that drafted.
        drafted: number of draft tokens.
        accepted: number of accepted draft tokens.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, counts: DraftCounts) -> "Served":
        return cls(counts.drafts, counts.drafted, counts.accepted)

    def since(self, before: "Served") -> "Served":
        return Served(self.steps - before.steps, self.drafted - before.drafted, self.accepted - before.accepted)

    @property
    def per_step(self) -> float:
        """Accepted draft tokens per step; 0 without steps."""
        return self.accepted / max(self.steps, 1)

    @property
    def squared_error(self) -> float:
        """An upper bound of the squared standard error of `per_step`.

        A number between 0 and K with mean m has at most the variance m * K.
        """
        drafts_per_step = self.drafted / max(self.steps, 1)
        return self.per_step * drafts_per_step / max(self.steps, 1)


@dataclass
class State(Resumable):
    """Everything that a resumed command must know.

    Attributes:
        heads: name of the heads that the server should have: "model", or the round that trained them.
        previous: name of the heads that the server had before them; "" if there is nothing to return to.
        rounds: number of rounds that have started.
        is_in_round: whether the last round has no decision yet.
        base: name of the heads from which the last round trains.
        last: digest of the end of the log that a round has used.
        instance: identity of the server's process that has the heads.
        sent: what that process had counted when it received them.
        before: what it counted with the heads before.
    """

    FILE: ClassVar[str] = "adapt.json"
    heads: str = MODEL
    previous: str = ""
    rounds: int = 0
    is_in_round: bool = False
    base: str = MODEL
    last: str = ""
    instance: str = ""
    sent: Served = Served()
    before: Served = Served()


def record(directory: Path, decision: str, why: str, **details: Any) -> None:
    """Append a decision to decisions.jsonl, and log it.

    Args:
        decision: one of sent, kept, failed, rolled_back, restored.
        why: the reason in a few words.
    """
    logger.info("%s: %s", decision, why)
    line = {"time": round(time.time(), 1), "decision": decision, "why": why, **details}
    with (directory / DECISIONS).open("a") as file:
        file.write(json.dumps(line) + "\n")
