"""`PromptItems`: what a prompt contains in addition to tokens, such as images, for decoding.

The values are those of a training sample (`data/batch.py`). Generated tokens have no items, and continue the positions
after the largest position of the prompt, as in transformers (`rope_deltas`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from swiftlite.data.batch import ITEM, Extra, collate
from swiftlite.data.sample import make_sample


@dataclass(frozen=True)
class PromptItems:
    """The inputs of a prompt for a tower, and the positions of its tokens along three axes.

    Attributes:
        of_tower: inputs of the tower by name, one entry per item (`Batch.items`).
        item: index of the item that each token stands for; -1 for tokens that use their embedding.
        axes: positions of each token along three axes; empty if the model has no such positions.
    """

    of_tower: Mapping[str, torch.Tensor] = field(default_factory=dict)
    item: Sequence[int] = ()
    axes: Sequence[Sequence[int]] = ()

    @classmethod
    def of(cls, token_ids: Sequence[int], values: Mapping[str, Any], extras: Sequence[Extra]) -> "PromptItems":
        """Collate the values of a prompt. Images are read here, if the values are lazy.

        Args:
            values: values by the name of their `Extra`, as in `Sample.extras`.
            extras: tensors that the model's batches contain.
        """
        needed = [extra for extra in extras if extra.per in ("token", "item")]
        if not needed:
            return NO_ITEMS
        sample = make_sample(token_ids, np.zeros(len(token_ids))).with_extras(**values)
        batch = collate([sample], 0, extras=needed)
        item: list[int] = []
        axes: list[list[int]] = []
        if ITEM in batch.extras:
            item = batch.extras[ITEM][0, 0].tolist()
        if batch.axes_3BS is not None:
            axes = batch.axes_3BS[:, 0].T.tolist()
        return cls(dict(batch.items), item, axes)

    def __len__(self) -> int:
        """Return the number of items."""
        return max(map(len, self.of_tower.values()), default=0)

    def item_of(self, position: int) -> int:
        """Return the index of the item for the token at a position; -1 without one, as for all generated tokens."""
        if position < len(self.item):
            return self.item[position]
        return -1

    def axes_of(self, position: int) -> Sequence[int]:
        """Return the three positions of the token at a position of the row. A generated token has three equal ones."""
        if position < len(self.axes):
            return self.axes[position]
        return [self._first_generated + position - len(self.axes)] * 3

    @cached_property
    def _first_generated(self) -> int:
        """Position of the first generated token along each axis."""
        return max(map(max, self.axes), default=-1) + 1


NO_ITEMS = PromptItems()
