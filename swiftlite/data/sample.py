"""`Sample`: one conversation as tokens, labels and weights. Plain numpy, so that workers need no torch."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

IGNORED = -100
"""Label of a token that does not train; torch's cross entropy skips it."""


@dataclass(frozen=True)
class Sample:
    """Arrays of equal length, one entry per token.

    Attributes:
        input_ids: int32.
        labels: int32; the token itself where it trains (NOT shifted), `IGNORED` elsewhere and at position 0, which
            nothing predicts.
        loss_scale: float32; what the label weighs in the loss, 0 where it is ignored.
        source: `file:line`.
        channel: the row's own name for its domain.
        rejected: the sample that this one is preferred to; None where it is no pair. A pair stays together: what counts
            samples counts it as one.
        desirable: whether the answer is a good one, where rows say so.
        mismatched: of such a sample, its question before the answer of another one (`rated.py`).
        reference: log-probabilities of the labels of both of a pair, or of the sample and `mismatched`, by a reference
            model.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    loss_scale: np.ndarray
    source: str = ""
    channel: str | None = None
    rejected: "Sample | None" = None
    desirable: bool | None = None
    mismatched: "Sample | None" = None
    reference: tuple[float, float] = (0.0, 0.0)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def answers(self) -> "list[Sample]":
        """The two of a pair, the preferred one first; else the sample alone."""
        return [self] if self.rejected is None else [self, self.rejected]

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.labels != IGNORED))


def make_sample(
    input_ids: Sequence[int] | np.ndarray,
    weights: Sequence[float] | np.ndarray,
    source: str = "",
    channel: str | None = None,
) -> Sample:
    """Labels follow from the weights: a token trains where its weight is above 0."""
    ids = np.asarray(input_ids, dtype=np.int32)
    loss_scale = np.array(weights, dtype=np.float32)
    loss_scale[:1] = 0
    return Sample(ids, np.where(loss_scale > 0, ids, np.int32(IGNORED)), loss_scale, source, channel)


def join(answers: Sequence[Sample]) -> Sample:
    """The pair of two answers, or the one sample."""
    return replace(answers[0], rejected=answers[1]) if len(answers) > 1 else answers[0]


def truncate(sample: Sample, max_length: int, strategy: Literal["left", "right"]) -> Sample:
    """Cut to `max_length` tokens: `left` loses the beginning, `right` the end. May leave no label."""
    if len(sample) <= max_length:
        return sample
    kept = slice(len(sample) - max_length, None) if strategy == "left" else slice(max_length)
    return make_sample(sample.input_ids[kept], sample.loss_scale[kept], sample.source, sample.channel)


def digest(samples: Iterable[Sample]) -> str:
    """sha256 over tokens, labels and weights in order: equal on two ranks only if they would train on the same data."""
    sha = hashlib.sha256()
    for pair in samples:
        if pair.desirable is not None:
            sha.update(b"\1" if pair.desirable else b"\0")
        for sample in pair.answers:
            sha.update(len(sample).to_bytes(8, "little"))
            for array in (sample.input_ids, sample.labels, sample.loss_scale):
                sha.update(array.tobytes())
    return sha.hexdigest()
