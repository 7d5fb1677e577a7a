"""Replace the embeddings of placeholder tokens by the outputs of a tower, such as an image tower.

Trunk and MTP heads use the same outputs: a head whose token is a placeholder receives the corresponding output.
`data/batch.py` shifts the indices of outputs with the tokens, so the tower runs once for all depths.

Shapes: K the number of predictions (1 for the trunk, 1 for each MTP depth), B rows, S tokens of a row on this rank, I
items of the micro-batch, H hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

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
        deepstack_IH: further outputs, which are added to the outputs of the first decoder layers; with a last row of
            zeros.
    """

    output_IH: torch.Tensor
    item_BS: torch.Tensor
    deepstack_IH: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of_depths(cls, outputs: torch.Tensor, item_KBS: torch.Tensor, hidden_size: int) -> "list[Placed]":
        """Place the outputs of a tower in the inputs of the trunk and of each MTP depth.

        Args:
            outputs: [I, H], or with deepstack [I, (1 + number of layers) * H].
        """
        output_IH, *deepstack_IH = F.pad(outputs, (0, 0, 0, 1)).split(hidden_size, dim=1)
        return [cls(output_IH, item_BS, tuple(deepstack_IH)) for item_BS in item_KBS]

    def features(self, item_SB: torch.Tensor) -> list[torch.Tensor]:
        """Return for each layer of deepstack the features [S, B, H] of the tokens, zeros for tokens without an output.

        Args:
            item_SB: as for `put_into`.
        """
        item_SB = item_SB.contiguous()
        return [output_IH[item_SB] for output_IH in self.deepstack_IH]

    def put_into(self, embeddings_SBH: torch.Tensor, item_SB: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, in which the outputs of the tower replace the embeddings of placeholder tokens.

        Args:
            item_SB: this sequence-parallel rank's part of `item_BS`, transposed.
        """
        item_SB = item_SB.contiguous()  # the layout of the result, which layers with experts require to be contiguous
        return torch.where((item_SB >= 0)[..., None], self.output_IH[item_SB], embeddings_SBH)
