"""Define the interface of a tower, a module before the trunk that computes embeddings of inputs other than tokens.

A new kind is a frozen dataclass with these methods and a line in `model/specs.py`. No family of swiftlite has one; the
tower of families that are published with one is copied unchanged (`Family.language_model`).
"""

from typing import Protocol

from swiftlite.bridge.rows import Row
from swiftlite.families.rank import ParameterCount, Rank


class Tower(Protocol):
    """The sizes of a tower, such as an image tower. Its rank holds all of it, on the stage of the embedding."""

    def rows(self) -> list[Row]:
        """Return its bridge rows with full names; Megatron names start with `tower.`."""
        ...

    def parameters(self, rank: Rank) -> ParameterCount:
        """Return the parameters on a rank."""
        ...
