"""Describe how an engine runs a family's MTP heads.

Engines differ in the inputs of heads and in the number of heads that they run, and do not report a mismatch: the text
is still correct, but acceptance drops. Each convention is measured: with it, an independent reference implementation
accepts the same number of draft tokens as the engine. docs/en/serving.md lists all conventions.
"""

from dataclasses import dataclass
from typing import Literal

from swiftlite.families import Family
from swiftlite.heads.drafting import Drafting


@dataclass(frozen=True)
class Convention:
    """The way an engine drafts with the heads of a family.

    Attributes:
        draft: name of the engine's class that runs the heads.
        heads: which of several heads draft. each: each head drafts its step. first: the first head drafts every step.
            last: all heads are loaded into the same parameters, so the last one drafts every step. one: checkpoints
            with more heads are not supported.
        drafting: inputs of the heads.
    """

    draft: str
    heads: Literal["each", "first", "last", "one"] = "each"
    drafting: Drafting = Drafting()

    def num_drafting(self, num_mtp_heads: int) -> int:
        """Return the number of a checkpoint's MTP heads that draft."""
        if self.heads == "each":
            return num_mtp_heads
        return min(num_mtp_heads, 1)


def as_trained(family: Family) -> Convention:
    """Return the convention of `engines/transformers/mtp_heads.py`.

    Each head drafts its step, with the same inputs as in training.
    """
    return Convention("MtpHead", "each", family.mtp.drafting)
