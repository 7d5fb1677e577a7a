"""Define the interface of a tower, a module before the trunk that computes embeddings of inputs other than tokens.

A new kind of tower is a frozen dataclass with the methods of `Tower`, and a line in `model/specs.py`. The towers of
published vision-language models are in `vision.py`; they are computed only in runs whose rows have images
(`Family.with_images`).
"""

from typing import NamedTuple, Protocol

from swiftlite.bridge.rows import Row
from swiftlite.families.rank import ParameterCount, Rank


class TrainedParts(NamedTuple):
    """The parts of a tower that are trained.

    Attributes:
        vit: whether the tower without its aligner is trained.
        aligner: whether the aligner is trained: the part that maps its features to embeddings of the language model.
    """

    vit: bool
    aligner: bool


FROZEN = TrainedParts(vit=False, aligner=False)


class TowerMacs(NamedTuple):
    """Multiply-adds of the forward and backward pass of a tower.

    Attributes:
        item: per item.
        square: per squared number of items of an image.
    """

    item: float
    square: float = 0.0


class TowerActivations(NamedTuple):
    """Bytes of the tensors that a tower stores for its backward pass, and of those that the backward pass recomputes
    at the same time.
    """

    stored: int
    recomputed: int


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

    def trained_parameters(self, trained: TrainedParts) -> ParameterCount:
        """Count the trained parameters on a rank."""
        ...

    def macs(self, trained: TrainedParts) -> TowerMacs:
        """Count the multiply-adds of matrix products."""
        ...

    def activation_bytes(
        self, num_items: int, itemsize: int, trained: TrainedParts, *, recomputes: bool
    ) -> TowerActivations:
        """Count the bytes of activations.

        Args:
            num_items: number of items of a micro-batch.
            itemsize: bytes of an activation: 2 for bfloat16, 4 for float32.
            recomputes: whether only the inputs of blocks are stored.
        """
        ...
