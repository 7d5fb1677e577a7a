"""Choose the draft vocabulary: the most frequent labels. See `swiftlite.base.draft_vocab`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.dataset import Data


@dataclass(frozen=True)
class DraftVocab:
    """The tokens of a draft vocabulary, and the share of the counted labels that they cover.

    Attributes:
        ids: token ids in ascending order.
        coverage: share of the counted labels that are among the ids, from 0 to 1.
    """

    ids: tuple[int, ...]
    coverage: float


def choose(counts_V: np.ndarray, size: int) -> DraftVocab:
    """Return the `size` tokens with the highest counts. Among tokens with equal counts, lower ids are chosen first.

    Args:
        counts_V: count of each token of the vocabulary.
        size: number of tokens to select.
    """
    order = np.argsort(-counts_V, kind="stable")[:size]
    return DraftVocab(tuple(sorted(order.tolist())), covered(counts_V, order))


def count(labels: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """Count how often each token is a label: int64 [V].

    Args:
        labels: labels of each sample; negative where ignored.
    """
    counts_V = np.zeros(vocab_size, np.int64)
    for sample_labels in labels:
        counts_V += np.bincount(sample_labels[sample_labels >= 0], minlength=vocab_size)
    return counts_V


def covered(counts_V: np.ndarray, ids: Sequence[int] | np.ndarray) -> float:
    """Return the share of the counted labels that are among `ids`, from 0 to 1."""
    return float(counts_V[np.asarray(ids)].sum() / max(1, counts_V.sum()))


def choose_from(data: Data, size: int, vocab_size: int, num_ranks: int = 1) -> tuple[int, ...]:
    """Return the `size` most frequent labels of the training rows, and log their coverage.

    Args:
        num_ranks: number of tensor-parallel ranks, which split the vocabulary evenly.

    Raises:
        UserError: none of these tokens is in a tensor-parallel rank's part of the vocabulary.
    """
    chosen = choose(count((sample.labels for sample in data.train), vocab_size), size)
    words = f"draft vocabulary: {size} of {vocab_size} tokens cover {chosen.coverage:.2%} of the labels to train on"
    if data.val:
        held_out = count((sample.labels for sample in data.val), vocab_size)
        share = covered(held_out, chosen.ids)
        words += f" and {share:.2%} of the held-out labels"
    logger.info("%s", words)
    rows_per_rank = vocab_size // num_ranks
    if len({token // rows_per_rank for token in chosen.ids}) < num_ranks:
        raise UserError(
            f"--draft_vocab {size}: a tensor-parallel rank holds none of these tokens", "use a larger --draft_vocab"
        )
    return chosen.ids
