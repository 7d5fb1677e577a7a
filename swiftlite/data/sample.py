"""`Sample`: one conversation as numpy arrays of tokens, labels and weights. Does not import torch."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

IGNORED = -100
"""Label of a token that is not trained. torch's cross-entropy ignores this label."""


class LazyItems(ABC):
    """The items of an extra (see `batch.Extra`) that are computed when a batch is collated, such as the pixels of
    images.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[np.ndarray]: ...

    @property
    @abstractmethod
    def group_sizes(self) -> Sequence[int]:
        """Numbers of items of each group, such as an image."""

    @property
    @abstractmethod
    def identity(self) -> bytes:
        """Bytes that are equal for equal items, and are known without computing the items."""


@dataclass(frozen=True)
class Sample:
    """The tokens of one sequence with their labels and loss weights, as arrays of equal length.

    Attributes:
        input_ids: int32.
        labels: int32; the token itself if it is trained (NOT shifted), otherwise `IGNORED`. Position 0 is always
            ignored, because nothing predicts it.
        loss_scale: float32; weight of the label in the loss, 0 if the label is `IGNORED`.
        source: `file:line`.
        channel: label of the row for separate metrics, such as its domain; None without a label.
        trains_heads: whether MTP heads are trained on this sample; False for rejected answers.
        others: further sequences of the sample, such as the rejected answer of a pair.
        companion: a sequence that is scored in separate micro-batches and not trained on (`rated.py`).
        extras: values for the training method, by the name of their `batch.Extra`. A value is a number, an array with
            one entry per token, or items: a tuple or `LazyItems`. Truncation does not shorten items.
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
        """All sequences of the sample: itself and `others`. In a pair, the preferred answer is first."""
        return [self, *self.others]

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.labels != IGNORED))

    def with_extras(self, **extras: Any) -> "Sample":
        """Return a copy of the sample with the values `extras` added to its extras."""
        return replace(self, extras={**self.extras, **extras})


def make_sample(
    input_ids: Sequence[int] | np.ndarray,
    weights: Sequence[float] | np.ndarray,
    source: str = "",
    channel: str | None = None,
) -> Sample:
    """Create a sample in which tokens with a weight above 0 are trained."""
    ids = np.asarray(input_ids, dtype=np.int32)
    loss_scale = np.array(weights, dtype=np.float32)
    loss_scale[:1] = 0
    return Sample(ids, np.where(loss_scale > 0, ids, np.int32(IGNORED)), loss_scale, source, channel)


def group_sizes(items: Any) -> Sequence[int]:
    """Return the numbers of items of each group, such as the patches of each image; values that are not lazy are one
    group.
    """
    if isinstance(items, LazyItems):
        return items.group_sizes
    return (len(items),)


def join(sequences: Sequence[Sample]) -> Sample:
    """Combine sequences into one sample: the first sequence, with the rest as its `others`."""
    return replace(sequences[0], others=tuple(sequences[1:]))


def truncate(sample: Sample, max_length: int, strategy: Literal["left", "right"]) -> Sample:
    """Truncate to `max_length` tokens by removing the beginning (`left`) or the end (`right`).

    The result may have no label.
    """
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
    """Compute the sha256 over tokens, labels and weights in order, to compare the data of ranks."""
    sha = hashlib.sha256()
    for sample in samples:
        for sequence in sample.sequences:
            for name in sorted(sequence.extras):
                sha.update(identity_of(sequence.extras[name]))
            sha.update(len(sequence).to_bytes(8, "little"))
            for array in (sequence.input_ids, sequence.labels, sequence.loss_scale):
                sha.update(array.tobytes())
    return sha.hexdigest()


def identity_of(extra: Any) -> bytes:
    """Return bytes that are equal for equal values of an extra. Lazy items are not computed."""
    if isinstance(extra, LazyItems):
        return extra.identity
    return np.asarray(extra).tobytes()
