"""`Sample`: one conversation as tokens, labels and weights. Plain numpy, so that workers need no torch."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
        trains_heads: whether MTP heads learn from it; they do not imitate a rejected answer.
        others: sequences that stay with this one, such as the rejected answer of a pair; they count as one sample.
        companion: a sequence that is scored in separate micro-batches and not trained on (`rated.py`).
        extras: values of the training method, by the names that it declares (`batch.Extra`): a number, an array of one
            entry per token, or a tuple of items, which are not cut with the tokens.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    loss_scale: np.ndarray
    source: str = ""
    channel: str | None = None
    trains_heads: bool = True
    others: "tuple[Sample, ...]" = ()
    companion: "Sample | None" = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def sequences(self) -> "list[Sample]":
        """All sequences of the sample: itself and `others`; of a pair, the preferred answer first."""
        return [self, *self.others]

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.labels != IGNORED))

    def with_extras(self, **extras: Any) -> "Sample":
        """Return the sample with these values added."""
        return replace(self, extras={**self.extras, **extras})


def make_sample(
    input_ids: Sequence[int] | np.ndarray,
    weights: Sequence[float] | np.ndarray,
    source: str = "",
    channel: str | None = None,
) -> Sample:
    """Make a sample whose labels follow from the weights: a token trains if its weight is above 0."""
    ids = np.asarray(input_ids, dtype=np.int32)
    loss_scale = np.array(weights, dtype=np.float32)
    loss_scale[:1] = 0
    return Sample(ids, np.where(loss_scale > 0, ids, np.int32(IGNORED)), loss_scale, source, channel)


def join(sequences: Sequence[Sample]) -> Sample:
    """Return one sample of all these sequences."""
    return replace(sequences[0], others=tuple(sequences[1:]))


def truncate(sample: Sample, max_length: int, strategy: Literal["left", "right"]) -> Sample:
    """Cut to `max_length` tokens: `left` loses the beginning, `right` the end. May leave no label."""
    if len(sample) <= max_length:
        return sample
    kept = slice(max_length)
    if strategy == "left":
        kept = slice(len(sample) - max_length, None)
    cut = make_sample(sample.input_ids[kept], sample.loss_scale[kept])
    extras = {}
    for name, value in sample.extras.items():
        if isinstance(value, np.ndarray):
            value = value[kept]
        extras[name] = value
    return replace(sample, input_ids=cut.input_ids, labels=cut.labels, loss_scale=cut.loss_scale, extras=extras)


def digest(samples: Iterable[Sample]) -> str:
    """Compute the sha256 over tokens, labels and weights in order: equal on two ranks only if they train on the same
    data."""
    sha = hashlib.sha256()
    for sample in samples:
        for sequence in sample.sequences:
            for name in sorted(sequence.extras):
                sha.update(np.asarray(sequence.extras[name]).tobytes())
            sha.update(len(sequence).to_bytes(8, "little"))
            for array in (sequence.input_ids, sequence.labels, sequence.loss_scale):
                sha.update(array.tobytes())
    return sha.hexdigest()
