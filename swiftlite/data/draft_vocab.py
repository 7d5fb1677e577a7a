"""Which tokens MTP heads are to draft: those that answers hold most often. See `swiftlite.draft_vocab`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DraftVocab:
    """A choice of tokens, and how many of the counted ones it has.

    Attributes:
        ids: in ascending order.
        coverage: share of the counted tokens that are among them, 0 to 1.
    """

    ids: tuple[int, ...]
    coverage: float


def choose(counts_V: np.ndarray, size: int) -> DraftVocab:
    """The tokens with the highest counts; of equals those with the lowest ids.

    Args:
        counts_V: how often each token of the vocabulary is to be said.
        size: how many to choose.
    """
    order = np.argsort(-counts_V, kind="stable")[:size]
    return DraftVocab(tuple(sorted(order.tolist())), covered(counts_V, order))


def count(labels: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """How often each token is learned: int64 [V].

    Args:
        labels: of each sample; below 0 where nothing is learned.
    """
    counts_V = np.zeros(vocab_size, np.int64)
    for of_sample in labels:
        counts_V += np.bincount(of_sample[of_sample >= 0], minlength=vocab_size)
    return counts_V


def covered(counts_V: np.ndarray, ids: Sequence[int] | np.ndarray) -> float:
    """Share of the counted tokens that are among `ids`, 0 to 1."""
    return float(counts_V[np.asarray(ids)].sum() / max(1, counts_V.sum()))
