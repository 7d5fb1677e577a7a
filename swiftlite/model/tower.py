"""Replace the embeddings of placeholder tokens by the outputs of a tower, such as an image tower.

Trunk and MTP heads use the same outputs: a head whose token is a placeholder receives the corresponding output.
`data/batch.py` shifts the indices of outputs with the tokens, so the tower runs once for all depths. It runs on the
first pipeline stage, which sends its outputs to later stages that read them (`SentOutputs`).

Shapes: K the number of predictions (1 for the trunk, 1 for each MTP depth), B rows, S tokens of a row on this rank, I
items of the micro-batch, O outputs of an item, H hidden size. An item is what becomes one token: of an image, four
neighboring patches. With deepstack an item has several outputs: one replaces the token's embedding, and the others are
added to its state after the first decoder layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swiftlite.data.batch import ITEM, Batch


@dataclass(frozen=True)
class TowerInputs:
    """The inputs of a model's tower for a micro-batch.

    Attributes:
        items: inputs of the tower, by name (`Batch.items`).
        num_items: number of items.
        item_KBS: int64; index of the tower's output that replaces the token's embedding, -1 for tokens that use their
            embedding.
    """

    items: Mapping[str, torch.Tensor]
    num_items: int
    item_KBS: torch.Tensor

    @classmethod
    def of(cls, batch: Batch) -> "TowerInputs | None":
        """Return the tower's inputs of a batch; None if the batch has no such inputs."""
        item_KBS = batch.extras.get(ITEM)
        if item_KBS is None:
            return None
        return cls(batch.items, batch.num_items, item_KBS)


def num_items_of(items: Mapping[str, torch.Tensor]) -> int:
    """Return the number of items of a micro-batch; tensors without values per item are shorter."""
    return max(map(len, items.values()), default=0)


@dataclass(frozen=True)
class SentOutputs:
    """The outputs of a tower that a pipeline stage receives from the previous stage, and sends to the next stage.

    They are sent as further positions behind the hidden states [S, B, H], so that their gradients return with those of
    the states. For example, 3 outputs of a micro-batch with B = 2 fill 2 positions, and the last place is zeros.

    Attributes:
        per_stage: number of outputs of an item that each stage sends (`plan.layout.tower_outputs_sent`); empty for a
            model without a tower.
        stage: number of this stage, in the order of the forward pass.
        per_item: number of outputs of an item on the stage of the tower.
    """

    per_stage: Sequence[int] = ()
    stage: int = 0
    per_item: int = 1

    def append(self, wire_SBH: torch.Tensor, outputs: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor to send: the states, then the outputs that the next stage receives.

        Args:
            outputs: [I, O * H]; None for a stage that has none.
        """
        number = _at(self.per_stage, self.stage)
        if not number or outputs is None or not len(outputs):
            return wire_SBH
        _, num_rows, hidden_size = wire_SBH.shape
        output_OH = outputs[:, : number * hidden_size].reshape(-1, hidden_size)
        padding = -len(output_OH) % num_rows
        return torch.cat([wire_SBH, F.pad(output_OH, (0, 0, 0, padding)).view(-1, num_rows, hidden_size)])

    def split(self, wire_SBH: torch.Tensor, num_items: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the states and the outputs [I, O * H] of a tensor that the previous stage sent.

        The outputs are None if the previous stage sends none to this stage.
        """
        number = _at(self.per_stage, self.stage - 1)
        if not number:
            return wire_SBH, None
        _, num_rows, hidden_size = wire_SBH.shape
        num_positions = len(wire_SBH) - self.num_positions(self.stage - 1, num_items, num_rows)
        output_OH = wire_SBH[num_positions:].reshape(-1, hidden_size)[: num_items * number]
        return wire_SBH[:num_positions], output_OH.view(num_items, number * hidden_size)

    def num_positions(self, stage: int, num_items: int, num_rows: int) -> int:
        """Return the number of positions that the outputs use in the tensor that a stage sends."""
        return -(-num_items * _at(self.per_stage, stage) // num_rows)


def _at(numbers: Sequence[int], index: int) -> int:
    """Return a number of a sequence; 0 outside of it."""
    return numbers[index] if 0 <= index < len(numbers) else 0


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
