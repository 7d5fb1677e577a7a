"""Describe how an engine runs a family's MTP heads.

Engines differ in the inputs of a head and in the number of heads that they run, and they do not report it: the text
stays correct, only the acceptance drops. Each line is measured: the engine's counts of accepted drafts equal those of
an independent reference that follows it. docs/en/serving.md shows all lines."""

from dataclasses import dataclass
from typing import Literal

from swiftlite.families import Family
from swiftlite.heads.drafting import Drafting


@dataclass(frozen=True)
class Convention:
    """The way an engine drafts with the heads of a family.

    Attributes:
        draft: the class that runs the heads, as the engine prints it.
        heads: which of several heads draft. each: every head drafts its own step. first: the first one drafts every
            step. last: all are loaded into the same parameters, so the last one drafts every step. one: a
            checkpoint with more heads is refused.
        drafting: inputs of the heads.
    """

    draft: str
    heads: Literal["each", "first", "last", "one"] = "each"
    drafting: Drafting = Drafting()

    def num_drafting(self, num_mtp_heads: int) -> int:
        """Return how many of a checkpoint's MTP heads draft."""
        if self.heads == "each":
            return num_mtp_heads
        return min(num_mtp_heads, 1)


def as_trained(family: Family) -> Convention:
    """Return the convention of `engines/transformers/mtp_heads.py`: each head drafts its own step, with the inputs that
    of its training."""
    return Convention("MtpHead", "each", family.mtp.drafting)
