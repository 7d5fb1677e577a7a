"""How an engine runs MTP heads, as a value: training runs them the same way. Imports nothing."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Drafting:
    """What a family's heads are fed by vLLM, and so in training; other engines' conventions are in their folders.

    Attributes:
        takes_before_norm: the trunk's state before its final norm; otherwise the one after it.
        recycles_before_norm: when a head goes on alone, its own state before its output norm; otherwise after it.
        zeroes_first_embedding: zeros for the embedding at a sequence's position 0.
    """

    takes_before_norm: bool = False
    recycles_before_norm: bool = False
    zeroes_first_embedding: bool = False
