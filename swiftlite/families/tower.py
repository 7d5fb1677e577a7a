"""What a tower says of itself: the module before the trunk that makes embeddings of something else than tokens.

A new kind is a frozen dataclass with these answers and a line in `model/specs.py`. The families of swiftlite name none:
of those published with an image tower, the tower is copied unchanged (`Family.language_model`).
"""

from typing import Protocol

from swiftlite.bridge.rows import Row
from swiftlite.families.rank import ParameterCount, Rank


class Tower(Protocol):
    """The sizes of a tower, such as an image tower. Its rank holds all of it, on the stage of the embedding."""

    def rows(self) -> list[Row]:
        """Return its bridge rows, names whole; those of Megatron begin with `tower.`."""
        ...

    def parameters(self, rank: Rank) -> ParameterCount:
        """Return the parameters on a rank."""
        ...
