"""Describe how an engine runs a family's MTP heads.

Engines differ in the inputs of heads and in the number of heads that they run. If heads were trained for other inputs,
engines do not report it: the text is still correct, but acceptance drops. Each convention was measured: an independent
implementation of the convention accepts the same number of draft tokens as the engine. docs/en/serving.md lists all
conventions.

An engine builds the modules of heads quantized or plain according to a list in quantization_config, which it compares
with its own names of the modules (`quantized.py`). A convention therefore also contains these names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from swiftlite.base.drafting import Drafting
from swiftlite.families import Family


@dataclass(frozen=True)
class Convention:
    """The way an engine drafts with the heads of a family.

    Attributes:
        draft: name of the engine's class that runs the heads.
        heads: which of several heads draft. "each": each head drafts in its step. "first": the first head drafts in
            every step. "last": all heads are loaded into the same parameters, so the last head drafts in every step.
            "one": checkpoints with several heads are not supported.
        drafting: inputs of the heads.
        drafts_once: whether the heads draft only one token per step.
        block: prefix of the names that the engine gives to the modules in the decoder layer of head {head}. The number
            {layer} follows after the trunk's layers.
        quantizes: names of further modules that the engine quantizes unless they are listed: projections that join
            embedding and hidden state, and routers.
        plain: names, in the decoder layer, of modules that the engine never quantizes.
        renames: maps prefixes of the modules in the decoder layer, as in files, to the engine's. Only prefixes that
            differ are listed.
    """

    draft: str
    heads: Literal["each", "first", "last", "one"] = "each"
    drafting: Drafting = Drafting()
    drafts_once: bool = False
    block: str = "mtp.layers.{head}."
    quantizes: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)

    def num_drafting(self, num_mtp_heads: int) -> int:
        """Return how many of a checkpoint's MTP heads draft."""
        if self.heads == "each":
            return num_mtp_heads
        return min(num_mtp_heads, 1)


@dataclass(frozen=True)
class Matching:
    """The way in which an engine compares names of its modules with the lists of a quantization_config.

    Attributes:
        label: the engine's official name.
        reads_files: whether the engine takes a missing list of gptq or awq from the files.
        compares_parts: whether an entry without a regular expression also matches a part of a name between dots, such
            as its end; otherwise it must be the whole name.
    """

    label: str
    reads_files: bool
    compares_parts: bool


def as_trained(family: Family) -> Convention:
    """Return the convention of the engine transformers (`engines/transformers/mtp_heads.py`).

    Each head drafts in its step, with the same inputs as in training.
    """
    return Convention("MtpHead", "each", family.mtp.drafting)
