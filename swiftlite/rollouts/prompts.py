"""Select the prompts of each generation as a function of its number. A resumed run therefore needs only this number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.sample import Sample


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run.

    Attributes:
        samples: one prompt per row of the dataset.
        num_generations: number of completions per prompt.
        sampler: selects the rows of each generation.
    """

    samples: Sequence[Sample]
    num_generations: int
    sampler: Sampler

    def rows(self, number: int) -> np.ndarray:
        """Return the rows of generation `number` (counted from 0), one per group of completions."""
        return self.sampler.global_batch(number)

    def further_rows(self, number: int) -> np.ndarray:
        """Return all other rows of the dataset, in an order that depends only on the seed and the generation."""
        # Not the sampler's order: the prompts of later generations stay the same, however many are drawn here.
        order = np.random.RandomState([self.sampler.seed, number, 1]).permutation(len(self.samples))
        return order[~np.isin(order, self.rows(number))]

    def stored_rows(self, number: int, stored: Any) -> Sequence[int] | np.ndarray:
        """Return the rows of a stored generation.

        Args:
            stored: the rows that `--dynamic_sample` stored with the completions, some of them further rows; None
                without it. A value that does not name rows of this dataset is ignored.
        """
        rows = self.rows(number)
        is_valid = isinstance(stored, list) and len(stored) == len(rows)
        if is_valid and all(type(row) is int and 0 <= row < len(self.samples) for row in stored):
            return stored
        return rows

    def of(self, rows: Sequence[int] | np.ndarray) -> list[Sample]:
        """Return the prompt of each completion; those of a group are adjacent."""
        prompts: list[Sample] = []
        for row in rows:
            prompts += [self.samples[row]] * self.num_generations
        return prompts
