"""Outputs of a tower, such as an image tower, in the place of the embeddings of placeholder tokens.

The trunk and the MTP heads see a tower's outputs alike: a head whose token is a placeholder gets the output that stands
for it. Which output that is, `data/batch.py` has shifted with the tokens, so the tower runs once for all of them.

Shapes: K the trunk and each MTP depth, B rows, S tokens of a row on this rank, I items of the micro-batch, H hidden
size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from swiftlite.data.batch import ITEM, Batch


@dataclass(frozen=True)
class TowerInputs:
    """What a micro-batch brings the tower of a model.

    Attributes:
        items: what the tower takes, by name (`Batch.items`).
        item_KBS: int64; the output of the tower that stands for the token, -1 where the token has its own embedding.
    """

    items: Mapping[str, torch.Tensor]
    item_KBS: torch.Tensor

    @classmethod
    def of(cls, batch: Batch) -> "TowerInputs | None":
        """Return those of a batch; None if its method brings none."""
        item_KBS = batch.extras.get(ITEM)
        return None if item_KBS is None else cls(batch.items, item_KBS)


@dataclass(frozen=True)
class Placed:
    """Outputs of a tower, and the tokens of the trunk or of one MTP depth that they stand for.

    Attributes:
        output_IH: all outputs of the micro-batch, and a last row of zeros, which stands for no token.
        item_BS: int64; as `TowerInputs.item_KBS`.
    """

    output_IH: torch.Tensor
    item_BS: torch.Tensor

    def put_into(self, embeddings_SBH: torch.Tensor, item_SB: torch.Tensor) -> torch.Tensor:
        """Return the embeddings with the outputs in their places.

        Args:
            item_SB: of the tokens of the embeddings, a sequence-parallel rank's part of `item_BS`.
        """
        return torch.where((item_SB >= 0)[..., None], self.output_IH[item_SB], embeddings_SBH)
