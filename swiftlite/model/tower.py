"""Replace the embeddings of placeholder tokens by the outputs of a tower, such as an image tower.

Trunk and MTP heads use the same outputs: a head whose token is a placeholder receives the corresponding output.
`data/batch.py` shifts the indices of outputs with the tokens, so the tower runs once for all depths.

Shapes: K the number of predictions (1 for the trunk, 1 for each MTP depth), B rows, S tokens of a row on this rank, I
items of the micro-batch, H hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from swiftlite.data.batch import ITEM, Batch


@dataclass(frozen=True)
class TowerInputs:
    """The inputs of a model's tower for a micro-batch.

    Attributes:
        items: inputs of the tower, by name (`Batch.items`).
        item_KBS: int64; index of the tower's output that replaces the token's embedding, -1 for tokens that use their
            embedding.
    """

    items: Mapping[str, torch.Tensor]
    item_KBS: torch.Tensor

    @classmethod
    def of(cls, batch: Batch) -> "TowerInputs | None":
        """Return the tower's inputs of a batch; None if the batch has no such inputs."""
        item_KBS = batch.extras.get(ITEM)
        if item_KBS is None:
            return None
        return cls(batch.items, item_KBS)


@dataclass(frozen=True)
class Placed:
    """Outputs of a tower, and the tokens that they replace in the input of the trunk or of one MTP depth.

    Attributes:
        output_IH: all outputs of the micro-batch, and a last row of zeros for other tokens.
        item_BS: int64; see `TowerInputs.item_KBS`.
    """

    output_IH: torch.Tensor
    item_BS: torch.Tensor

    def put_into(self, embeddings_SBH: torch.Tensor, item_SB: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, in which the outputs of the tower replace the embeddings of placeholder tokens.

        Args:
            item_SB: this sequence-parallel rank's part of `item_BS`, transposed.
        """
        item_SB = item_SB.contiguous()  # the layout of the result, which layers with experts require to be contiguous
        return torch.where((item_SB >= 0)[..., None], self.output_IH[item_SB], embeddings_SBH)
