"""What an engine does with a family's MTP heads.

Engines differ in which state they feed a head and in how many heads they run, and none of them reports it: the text
stays right, only the acceptance falls. Each line is measured: the running engine's counts of accepted drafts equal
those of an independent reference that follows it. docs/en/serving.md shows all lines.
"""

from dataclasses import dataclass
from typing import Literal

from swiftlite.families import Family
from swiftlite.heads.drafting import Drafting


@dataclass(frozen=True)
class Convention:
    """How one engine drafts with one family's heads.

    Attributes:
        draft: the class that runs the heads, as the engine prints it.
        heads: which of several heads draft. each: every head its own step. first: the first one every step, the others
            never. last: all are loaded into one place, so the last one stays and drafts every step. one: a checkpoint
            with more is refused.
        drafting: what the heads are fed.
    """

    draft: str
    heads: Literal["each", "first", "last", "one"] = "each"
    drafting: Drafting = Drafting()

    def num_drafting(self, num_mtp_heads: int) -> int:
        """How many of a checkpoint's MTP heads draft."""
        return num_mtp_heads if self.heads == "each" else min(num_mtp_heads, 1)


def as_trained(family: Family) -> Convention:
    """Return the convention of `engines/transformers/mtp_heads.py`: each head drafts its own step, with the inputs that
    it had in training."""
    return Convention("MtpHead", "each", family.mtp.drafting)
