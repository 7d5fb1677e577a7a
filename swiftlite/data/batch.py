"""`Batch`: the tensors of a micro-batch, as padded rows of one sequence each, or as one packed row.

Labels are shifted to the positions where they are predicted. A batch also contains shifted tokens and labels for each
MTP depth. This module shifts them within each sequence, before rows are split over context-parallel ranks.

Shape suffixes: K the number of predictions (1 for the trunk, 1 for each MTP depth), B rows of the micro-batch, S tokens
of a row, N sequences of the micro-batch, I items of the micro-batch.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from swiftlite.data.sample import IGNORED, Sample, group_sizes, identity_of

ITEM = "item"
"""Name of the `Extra` with the index (from 0) of the tower's output that replaces the embedding of each token; -1 for
tokens that use their embedding (`model/tower.py`).
"""
AXES = "axes"
"""Name of the `Extra` with the positions of each token along three axes: time, row and column of an image. For text,
all three are the token's position.
"""


@dataclass(frozen=True)
class Extra:
    """A tensor that a training method adds to every batch, collated from `Sample.extras`.

    Attributes:
        name: key of the values in `Sample.extras`, and of the tensor in `Batch.extras`.
        dtype: dtype of the tensor.
        per: what a value belongs to. `sequence`: one value per sequence of the micro-batch, [N], not split over
            context-parallel ranks. `label`: one value per label of the trunk, [B, S], shifted and split like labels;
            the value of token t of a sample is at the position that predicts token t. `token`: one value per token that
            the trunk or an MTP depth reads, [K, *shape, B, S], shifted and split like tokens. `item`: the concatenated
            items of all sequences, [I, *shape], not split over context-parallel ranks; a sequence has any number of
            items. Successive sequences whose value is the same object share its items, such as both answers of a pair.
        default: value for padding, and for sequences whose `Sample.extras` do not contain this name.
        default_is_position: whether the default of a token in a sequence is the position of the token, in all entries;
            the default of padding is still `default`.
        shape: shape of one value of a token or an item; empty for a number.
        counts: set if the values are indices of items: the name of the extra with these items. In a sample the indices
            count the items of the sample, in a batch those of the whole micro-batch, both from 0. Negative values are
            not changed.
    """

    name: str
    dtype: torch.dtype = torch.float32
    per: Literal["sequence", "label", "token", "item"] = "sequence"
    default: float = 0.0
    shape: tuple[int, ...] = ()
    counts: str = ""
    default_is_position: bool = False


def shift_left(tensor_BS: torch.Tensor, fill: float, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """Shift by one token: result[b, s] = tensor[b, s + 1], and `fill` at the end of each sequence.

    Args:
        cu_seqlens: starts of the sequences of a packed row, as in `Batch`; None: each row is one sequence.
    """
    shifted = tensor_BS.roll(-1, dims=1)
    if cu_seqlens is None:
        shifted[:, -1] = fill
    else:
        shifted[:, cu_seqlens[1:].long() - 1] = fill
    return shifted


def ahead(
    tensor_BS: torch.Tensor, num_drafts: int, fill: float, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Stack the tensor with its shifts, [K, B, S]: unshifted for the trunk, and shifted by k tokens for MTP depth k."""
    views = [tensor_BS]
    for _ in range(num_drafts):
        views.append(shift_left(views[-1], fill, cu_seqlens))
    return torch.stack(views)


@dataclass
class Batch:
    """One micro-batch: padded rows of one sequence each, or one packed row [1, S].

    Attributes:
        tokens_KBS: int64. For the trunk, the tokens, and the pad token after the end of a sequence. For depth k, the
            token k positions later in the same row or packed sequence, and 0 past its end.
        labels_KBS: int64; `labels[k, b, s]` is the token at s + k + 1 of the same sequence; -100 if it is ignored or
            does not exist. `on_this_rank` keeps them on the host, where targets are counted.
        loss_scale_KBS: float32; weight of `labels[k, b, s]` in the loss; 0 if the label is -100.
        position_ids_BS: int64; 0, 1, 2, ... in every sequence.
        sequence_KBS: int64; index in the micro-batch of the sequence that `tokens[k, b, s]` belongs to; -1 for padding
            and at the last k positions of each sequence, where there is no token.
        num_tokens: number of tokens without padding.
        lengths: number of tokens of each sequence without padding; they determine the cost of a step.
        cu_seqlens: int32 [N + 1], or [N + 2] if padding fills the row: the start of each sequence of a packed row
            including its padding, and S. It is on the host, because shapes depend on it, and describes the whole
            row even after the row was split over ranks. None: the rows are padded.
        num_sequences: N; sequences that are only padding do not count.
        extras: tensors of the training method by name, see `Extra`. The sequences of one sample are adjacent: for
            pairs, sequence 2p is the preferred answer of pair p and sequence 2p + 1 the rejected one.
        num_items: number of items, such as groups of patches of images.
        item_squares: sum of the squared numbers of items of each image.
        items: tensors of the extras with one value per item, by name. They are always on the host; the tower that reads
            them moves them. They are computed each time they are read, see `Items`.
        on_host: the batch before it was moved to a device; None if the batch was not moved.
    """

    tokens_KBS: torch.Tensor
    labels_KBS: torch.Tensor
    loss_scale_KBS: torch.Tensor
    position_ids_BS: torch.Tensor
    sequence_KBS: torch.Tensor
    num_tokens: int
    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor | None = None
    num_sequences: int = 0
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    num_items: int = 0
    item_squares: int = 0
    items: "Items" = field(default_factory=lambda: Items((), ()))
    on_host: "Batch | None" = None

    @property
    def axes_3BS(self) -> torch.Tensor | None:
        """Positions of the trunk's tokens along three axes (`AXES`), int64; None if samples have no such positions."""
        axes_K3BS = self.extras.get(AXES)
        return None if axes_K3BS is None else axes_K3BS[0]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Apply a function to the tensors with one entry per token, for example to move or split them."""
        return replace(
            self,
            tokens_KBS=function(self.tokens_KBS),
            labels_KBS=function(self.labels_KBS),
            loss_scale_KBS=function(self.loss_scale_KBS),
            position_ids_BS=function(self.position_ids_BS),
            sequence_KBS=function(self.sequence_KBS),
            extras=self._map_extras(function, per_sequence=False),
        )

    def map_per_sequence(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Apply a function to the tensors with one entry per sequence."""
        return replace(self, extras=self._map_extras(function, per_sequence=True))

    def _map_extras(
        self, function: Callable[[torch.Tensor], torch.Tensor], per_sequence: bool
    ) -> dict[str, torch.Tensor]:
        extras = dict(self.extras)
        for name, tensor in extras.items():
            if (tensor.dim() == 1) == per_sequence:
                extras[name] = function(tensor)
        return extras


class Items(Mapping[str, torch.Tensor]):
    """The items of a micro-batch by the names of their extras, [I, *shape] each; shared items once.

    A tensor is computed each time it is read. A batch therefore holds no pixels, and images are decoded only by a rank
    with a tower, when the tower reads them.

    Args:
        sequences: all sequences of the micro-batch.
        extras: extras of the batch.
    """

    def __init__(self, sequences: Sequence[Sample], extras: Sequence[Extra]):
        self._extras = {extra.name: extra for extra in extras if extra.per == "item"}
        self._values = {name: list(_unshared_items(name, sequences)) for name in self._extras}

    def __getitem__(self, name: str) -> torch.Tensor:
        extra = self._extras[name]
        items: list[np.ndarray] = []
        for own in self._values[name]:
            items += own
        return torch.from_numpy(np.array(items)).to(extra.dtype).view(-1, *extra.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._extras)

    def __len__(self) -> int:
        return len(self._extras)

    @property
    def identity(self) -> bytes:
        """The sha256 of what determines the tensors; images are not decoded for it."""
        sha = hashlib.sha256()
        for name in sorted(self._extras):
            for own in self._values[name]:
                sha.update(hashlib.sha256(identity_of(own)).digest())
        return sha.digest()


def collate(
    sequences: Sequence[Sample],
    pad_token_id: int,
    *,
    num_drafts: int = 0,
    pad_to_multiple_of: int = 1,
    extras: Sequence[Extra] = (),
) -> Batch:
    """Return a batch with one row per sequence. Rows have the length of the longest sequence, rounded up to a multiple.

    Args:
        sequences: the sequences; an empty list gives one row of padding.
        pad_token_id: can be any token of the vocabulary, because attention is causal and padding is at the end.
        pad_to_multiple_of: multiple for the length of rows, so that ranks can split them (`plan.run.row_multiple_of`).
        extras: tensors that the training method adds.
    """
    num_rows = max(1, len(sequences))
    longest = max(map(len, sequences), default=1)
    length = _round_up(max(1, longest), pad_to_multiple_of)
    starts = range(0, num_rows * length, length)
    position_ids_BS = torch.arange(length).repeat(num_rows, 1)
    return _lay_out(sequences, starts, position_ids_BS, pad_token_id, num_drafts, extras)


def collate_packed(
    sequences: Sequence[Sample],
    pad_token_id: int,
    *,
    num_drafts: int = 0,
    pad_each_to_multiple_of: int = 1,
    pad_to_multiple_of: int = 1,
    extras: Sequence[Extra] = (),
) -> Batch:
    """Return a batch with one packed row of all sequences, each padded separately.

    Padding at the end of the row is an additional sequence.

    Args:
        sequences: the sequences; an empty list gives a row of padding.
        pad_token_id: can be any token of the vocabulary, because sequences do not see padding.
        pad_each_to_multiple_of: multiple for the length of each sequence, so that context-parallel ranks can split it
            (`plan.layout.sequence_multiple`).
        pad_to_multiple_of: multiple for the length of the row (`plan.run.row_multiple_of`); itself a multiple of
            `pad_each_to_multiple_of`.
        extras: tensors that the training method adds.

    Example: sequences of 3 and 1 tokens are padded to a multiple of 2, and the row to a multiple of 8. The sequences of
    the row have 4, 2 and 2 tokens; the last one is only padding. `cu_seqlens` is 0, 4, 6, 8, and positions are 0, 1, 2,
    3, 0, 1, 0, 1.
    """
    assert pad_to_multiple_of % pad_each_to_multiple_of == 0
    lengths = [_round_up(len(sequence), pad_each_to_multiple_of) for sequence in sequences]
    num_tokens = sum(lengths)
    rest = _round_up(max(1, num_tokens), pad_to_multiple_of) - num_tokens
    if rest:
        lengths.append(rest)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    starts = cu_seqlens[:-1]
    positions_in_row = torch.arange(sum(lengths))
    position_ids_BS = (positions_in_row - starts.repeat_interleave(cu_seqlens.diff()))[None]
    return _lay_out(sequences, starts.tolist(), position_ids_BS, pad_token_id, num_drafts, extras, cu_seqlens.int())


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _lay_out(
    sequences: Sequence[Sample],
    starts: Sequence[int],
    position_ids_BS: torch.Tensor,
    pad_token_id: int,
    num_drafts: int,
    extras: Sequence[Extra],
    cu_seqlens: torch.Tensor | None = None,
) -> Batch:
    """Place each sequence at its start, an index into the concatenated rows, and fill the rest with padding."""
    num_tokens = position_ids_BS.numel()
    tokens = np.full(num_tokens, pad_token_id, np.int64)
    labels = np.full(num_tokens, IGNORED, np.int64)
    loss_scale = np.zeros(num_tokens, np.float32)
    numbers = np.full(num_tokens, -1, np.int64)
    is_idle = np.zeros(num_tokens, bool)
    # A packed row may have one more start, for its padding; a batch without sequences has one row.
    for number, (start, sequence) in enumerate(zip(starts, sequences, strict=False)):
        here = slice(start, start + len(sequence))
        tokens[here] = sequence.input_ids
        labels[here] = sequence.labels
        loss_scale[here] = np.where(sequence.labels == IGNORED, 0, sequence.loss_scale)
        numbers[here] = number
        is_idle[here] = not sequence.trains_heads

    def rows(array: np.ndarray, num_shifts: int, fill: float) -> torch.Tensor:
        """Return an array and its shifts, [1 + num_shifts, B, S]."""
        return ahead(torch.from_numpy(array).view_as(position_ids_BS), num_shifts, fill, cu_seqlens)

    labels_KBS = rows(labels, num_drafts + 1, fill=IGNORED)[1:]  # the trunk predicts one token ahead
    loss_scale_KBS = rows(loss_scale, num_drafts + 1, fill=0)[1:]
    is_idle_BS = torch.from_numpy(is_idle).view_as(position_ids_BS)
    # A token and its label at any depth belong to the same sequence, so all depths use one mask.
    labels_KBS[1:].masked_fill_(is_idle_BS, IGNORED)
    loss_scale_KBS[1:].masked_fill_(is_idle_BS, 0)
    tensors = {}
    for extra in extras:
        if extra.per == "sequence":
            values = [sequence.extras.get(extra.name, extra.default) for sequence in sequences]
            tensors[extra.name] = torch.tensor(values, dtype=extra.dtype)
        elif extra.per == "label":
            per_token = _per_token(extra, sequences, starts, num_tokens)
            # One token ahead, like the labels of the trunk.
            tensors[extra.name] = rows(per_token, 1, fill=extra.default)[1].to(extra.dtype)
        elif extra.per == "token":
            per_token = _per_token(extra, sequences, starts, num_tokens)
            tensors[extra.name] = _ahead_of_tokens(extra, per_token, position_ids_BS, num_drafts, cu_seqlens)
    num_items, item_squares = count_items(sequences, extras)
    return Batch(
        tokens_KBS=rows(tokens, num_drafts, fill=0),
        labels_KBS=labels_KBS,
        loss_scale_KBS=loss_scale_KBS,
        position_ids_BS=position_ids_BS,
        sequence_KBS=rows(numbers, num_drafts, fill=-1),
        num_tokens=sum(map(len, sequences)),
        lengths=tuple(map(len, sequences)),
        cu_seqlens=cu_seqlens,
        num_sequences=len(sequences),
        extras=tensors,
        num_items=num_items,
        item_squares=item_squares,
        items=Items(sequences, extras),
    )


def count_items(sequences: Sequence[Sample], extras: Sequence[Extra]) -> tuple[int, int]:
    """Return the number of items of a batch, and the sum of the squared numbers of items of each image.

    Shared items count once. All extras per item have the same number of items.
    """
    names = [extra.name for extra in extras if extra.per == "item"]
    if not names:
        return 0, 0
    sizes: list[int] = []
    for own in _unshared_items(names[0], sequences):
        sizes += group_sizes(own)
    return sum(sizes), sum(size**2 for size in sizes)


def _per_token(extra: Extra, sequences: Sequence[Sample], starts: Sequence[int], num_tokens: int) -> np.ndarray:
    """Return the unshifted values of one extra per token: float64 [num_tokens, *shape]."""
    values = np.full((num_tokens, *extra.shape), extra.default, np.float64)
    first_items = _first_items(extra.counts, sequences)
    for start, sequence, first_item in zip(starts, sequences, first_items, strict=False):
        here = values[start : start + len(sequence)]
        value = sequence.extras.get(extra.name, extra.default)
        if extra.default_is_position and extra.name not in sequence.extras:
            value = np.arange(len(sequence)).reshape(-1, *[1] * len(extra.shape))
        here[:] = value
        if extra.counts:
            here[here >= 0] += first_item
    return values


def _ahead_of_tokens(
    extra: Extra,
    per_token: np.ndarray,
    position_ids_BS: torch.Tensor,
    num_drafts: int,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """Return the values of `_per_token` for the trunk and each MTP depth, [K, *shape, B, S]."""
    num_rows, length = position_ids_BS.shape
    numbers_last = torch.from_numpy(per_token).view(num_rows, length, -1)
    rows = numbers_last.movedim(-1, 0).reshape(-1, length)  # one row per entry of a token
    shifted = ahead(rows, num_drafts, extra.default, cu_seqlens)
    return shifted.view(1 + num_drafts, *extra.shape, num_rows, length).to(extra.dtype)


def _first_items(name: str, sequences: Sequence[Sample]) -> list[int]:
    """Return the index of the first item of each sequence in the tensors of `Items`.

    Args:
        name: name of the extra with the items.
    """
    first_items = []
    first = end = 0
    for own in _unshared_items(name, sequences):
        if len(own):  # else the items are those of the previous sequence, or there are none
            first, end = end, end + len(own)
        first_items.append(first)
    return first_items


def _unshared_items(name: str, sequences: Sequence[Sample]) -> Iterator[Any]:
    """Yield the items of each sequence: a value of `Sample.extras`; () for those of the previous sequence."""
    previous: Any = ()
    for sequence in sequences:
        own = sequence.extras.get(name, ())
        yield () if own is previous else own
        previous = own
