"""Samples that are changed when they are read, so that only what is added to them needs memory."""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from swiftlite.data.packing.packing import join_ranges
from swiftlite.data.sample import Sample


class LazySamples(Sequence[Sample]):
    """Samples that are created when they are read, with lengths that are known before."""

    @abstractmethod
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of all sequences, and the index of each sample's first sequence, as int64."""


def lengths_of(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of all sequences of the samples, and the index of each sample's first sequence, as int64."""
    if isinstance(samples, LazySamples):
        return samples.lengths()
    lengths: list[int] = []
    starts: list[int] = []
    for sample in samples:
        starts.append(len(lengths))
        lengths += map(len, sample.sequences)
    return np.array(lengths, np.int64), np.array(starts, np.int64)


class ChangedSamples(LazySamples):
    """Samples that are changed by a function. A slice is again `ChangedSamples`.

    Args:
        samples: the samples before the change.
        change: called with the number of a sample in `samples` and the sample; returns a sample whose sequences have
            the same lengths.
        numbers: int64, the numbers in `samples` of the samples of this sequence; None: all of them.
    """

    def __init__(
        self, samples: Sequence[Sample], change: Callable[[int, Sample], Sample], numbers: np.ndarray | None = None
    ):
        self._samples, self._change = samples, change
        self._numbers = np.arange(len(samples)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return ChangedSamples(self._samples, self._change, self._numbers[index])
        number = int(self._numbers[index])
        return self._change(number, self._samples[number])

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        lengths, starts = lengths_of(self._samples)
        counts = np.diff(starts, append=len(lengths))[self._numbers]
        return lengths[join_ranges(starts[self._numbers], counts)], np.cumsum(counts) - counts


class JoinedSamples(LazySamples):
    """The samples of several groups, one group after the other. Slices are not supported.

    Args:
        groups: the groups, of which at least one has a sample.
    """

    def __init__(self, *groups: Sequence[Sample]):
        self._groups = groups
        self._ends = list(accumulate(map(len, groups)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        group = bisect_right(self._ends, index)
        return self._groups[group][index - self._ends[group]]  # negative: counted from the end of the group

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        found = [lengths_of(group) for group in self._groups]
        firsts = np.cumsum([0, *(len(lengths) for lengths, _ in found[:-1])])
        starts = [own + first for (_, own), first in zip(found, firsts, strict=True)]
        return np.concatenate([lengths for lengths, _ in found]), np.concatenate(starts)
