"""Draw the file of each row for --interleave_prob, with a seed and identically on every rank."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

BLOCK = 1024
"""Number of rows drawn at once. Each block of rows has a separate seed, so that any row can be looked up."""


class Mixture:
    """A mixture of rows from several parts (files), drawn at random. For example, row 7 of the mixture can be row 2 of
    part 1.

    Args:
        probabilities: weight of each part; only ratios matter. Empty: one part has all rows.
        seed: at least 0.
    """

    def __init__(self, probabilities: Sequence[float] = (), seed: int = 0):
        given = np.array(probabilities or [1.0])
        self._probabilities = given / given.sum()
        self._seed = seed
        self._block = lru_cache(maxsize=4)(self._draw)  # rows are read in order, mostly from the same block
        self._counts = [np.zeros(len(given), np.int64)]  # rows of each part before each block

    @property
    def num_parts(self) -> int:
        return len(self._probabilities)

    def part(self, row: int) -> int:
        """Return the part that a row belongs to."""
        return int(self._block(row // BLOCK)[row % BLOCK])

    def counts(self, row: int) -> list[int]:
        """Return the number of rows of each part among the first `row` rows."""
        block, rest = divmod(row, BLOCK)
        while len(self._counts) <= block:
            drawn = np.bincount(self._block(len(self._counts) - 1), minlength=self.num_parts)
            self._counts.append(self._counts[-1] + drawn)
        inside = np.bincount(self._block(block)[:rest], minlength=self.num_parts)
        return (self._counts[block] + inside).tolist()

    def place(self, row: int) -> tuple[int, int]:
        """Return the part of a row, and its index in that part."""
        part = self.part(row)
        return part, self.counts(row)[part]

    def _draw(self, block: int) -> np.ndarray:
        if self.num_parts == 1:
            return np.zeros(BLOCK, np.int64)
        # RandomState, because numpy guarantees its stream across versions, unlike that of Generator.
        random = np.random.RandomState([self._seed, block])
        return random.choice(self.num_parts, BLOCK, p=self._probabilities)


def interleave(lengths: Sequence[int], mixture: Mixture) -> list[tuple[int, int]]:
    """Return (part, row of the part) for all drawn rows. Drawing ends when a part without further rows is drawn.

    Example: parts of 3 and 1 rows, drawn in the order 0, 1, 0, 1, ... give (0, 0), (1, 0), (0, 1).

    Args:
        lengths: number of rows of each part.
    """
    taken: list[tuple[int, int]] = []
    num_taken = [0] * mixture.num_parts
    while True:
        part = mixture.part(len(taken))
        if num_taken[part] == lengths[part]:
            return taken
        taken.append((part, num_taken[part]))
        num_taken[part] += 1
