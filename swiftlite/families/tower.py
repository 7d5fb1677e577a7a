"""Define the interface of a tower, a module before the trunk that computes embeddings of inputs other than tokens.

A new kind of tower is a frozen dataclass with the methods of `Tower`, and a line in `model/specs.py`. The towers of
published vision-language models are in `vision.py`; they are computed only in runs whose rows have images
(`Family.with_images`).
"""

from typing import Protocol

from swiftlite.bridge.rows import Row
from swiftlite.families.rank import ParameterCount, Rank


class Tower(Protocol):
    """The sizes of a tower, such as an image tower. Each rank of the stage with the embedding holds the whole tower."""

    @property
    def num_deepstack(self) -> int:
        """Number of further outputs per item, which are added to the outputs of the first decoder layers."""
        ...

    def rows(self) -> list[Row]:
        """Return the bridge rows with names in the whole model; Megatron names start with `tower.`."""
        ...

    def parameters(self, rank: Rank) -> ParameterCount:
        """Count the parameters on a rank."""
        ...
