"""The draft vocabulary: the tokens that MTP heads can draft, where they are not all of the model's.

A head computes one logit per token that it can draft, and in a small model that is most of its work. Answers hold few
tokens of the vocabulary; those that they hold most often are enough, because the trunk says all others itself.

config.json has the ids as text, neighbours joined: "0-2 5 8-9" is 0, 1, 2, 5, 8, 9.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from swiftlite.errors import UserError

TOKEN_MAP_FILE = "speculative_token_map.pt"
"""In an export, for SGLang's option of that name: the ids once more, a list as `torch.save` writes it."""


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


def to_text(ids: Sequence[int]) -> str:
    """Ascending ids as config.json has them; "" for none."""
    if not ids:
        return ""
    numbers = np.asarray(ids)
    begins = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    runs = np.split(numbers, begins[1:])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def from_text(text: object, vocab_size: int) -> tuple[int, ...]:
    """The ids that `to_text` wrote.

    Raises:
        UserError: it is something else, or has ids beyond the vocabulary.
    """
    ids: list[int] = []
    for run in str(text).split():
        if not re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})?", run):
            raise UserError(f"config.json: mtp_draft_vocab has '{run[:40]}', which is no id and no range of ids")
        first, _, last = run.partition("-")
        if int(last or first) >= vocab_size:
            raise UserError(f"config.json: mtp_draft_vocab has {run}, and vocab_size is {vocab_size}")
        ids += range(int(first), int(last or first) + 1)
    if not ids or sorted(set(ids)) != ids:
        raise UserError("config.json: the ids of mtp_draft_vocab are not in ascending order")
    return tuple(ids)
