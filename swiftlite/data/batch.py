"""`Batch`: samples as tensors, side by side in padded rows or one after the other in a packed row, with labels shifted
to where they are predicted.

A batch carries what each MTP depth sees and predicts as well, shifted here, inside each sequence and on whole rows:
what comes later may cut the rows over context-parallel ranks.

Shape suffixes: K the trunk and each MTP depth, B rows of the micro-batch, S tokens of a row, P pairs of answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from swiftlite.data.sample import IGNORED, Sample

NO_SAMPLE = Sample(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), source="padding")
"""Fills a batch up where rows run out: nothing but padding, no label."""


def shift_left(tensor_BS: torch.Tensor, fill: float, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """What stands one token later, result[b, s] = tensor[b, s + 1], and `fill` at the end of each sequence.

    Args:
        cu_seqlens: where the sequences of a packed row start, see `Batch`; without it each row is one sequence.
    """
    shifted = tensor_BS.roll(-1, dims=1)
    last_S = -1 if cu_seqlens is None else cu_seqlens[1:].long() - 1
    shifted[:, last_S] = fill
    return shifted


def ahead(
    tensor_BS: torch.Tensor, num_drafts: int, fill: float, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """[K, B, S]: the tensor itself for the trunk, and for MTP depth k what stands k tokens later in its sequence."""
    views = [tensor_BS]
    for _ in range(num_drafts):
        views.append(shift_left(views[-1], fill, cu_seqlens))
    return torch.stack(views)


@dataclass
class Batch:
    """One micro-batch: padded rows of one sample each, or one packed row [1, S].

    Attributes:
        tokens_KBS: int64; the pad token after the end of a sample.
        labels_KBS: int64; `labels[k, b, s]` is the token at s + k + 1 of the same sample, -100 where that does not
            train or there is none. They stay on the host, since the number of targets follows from them.
        loss_scale_KBS: float32; weight of `labels[k, b, s]`, 0 where that is -100.
        position_ids_BS: int64; 0, 1, 2, ... in every sequence.
        sequence_KBS: int64; the number of the sequence that `tokens[k, b, s]` belongs to, counted through the
            micro-batch; -1 where there is no token, in padding and at the last k positions of each sequence.
        num_tokens: tokens without padding.
        squares: sum of the squared lengths of the samples; with `num_tokens`, what a step costs.
        cu_seqlens: int32 [num_sequences + 1], where each sequence of a packed row starts, its padding counted, and
            last S. It is on the host, since shapes follow from it, and stays that of the whole row when the row is cut
            over ranks. None: the rows are padded.
        reference_P2: float32, on the host; of pairs of answers, the log-probabilities by a reference model. Sequence
            2p is the preferred answer of pair p, sequence 2p + 1 the other one. Of no pairs it is empty.
        desirable_P: bool, on the host; of single answers, whether each is a good one. Sequence p is answer p, and of
            `reference_P2` the second column is of its mismatched answer.
        on_host: the same batch before it was moved to a device; None: it was not moved.
    """

    tokens_KBS: torch.Tensor
    labels_KBS: torch.Tensor
    loss_scale_KBS: torch.Tensor
    position_ids_BS: torch.Tensor
    sequence_KBS: torch.Tensor
    num_tokens: int
    squares: int
    cu_seqlens: torch.Tensor | None = None
    reference_P2: torch.Tensor = field(default_factory=partial(torch.zeros, 0, 2))
    desirable_P: torch.Tensor = field(default_factory=partial(torch.zeros, 0, dtype=torch.bool))
    on_host: "Batch | None" = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch with its tensors of one entry per token replaced: moved to a device, cut along the last axis."""
        return replace(
            self,
            tokens_KBS=function(self.tokens_KBS),
            labels_KBS=function(self.labels_KBS),
            loss_scale_KBS=function(self.loss_scale_KBS),
            position_ids_BS=function(self.position_ids_BS),
            sequence_KBS=function(self.sequence_KBS),
        )


def collate(samples: Sequence[Sample], pad_token_id: int, *, num_drafts: int = 0, pad_to_multiple_of: int = 1) -> Batch:
    """One row per sample, padded to the longest, rounded up to a multiple.

    Args:
        samples: at least one.
        pad_token_id: any token of the vocabulary; causal attention keeps samples from seeing what follows them.
        pad_to_multiple_of: so that ranks can share rows by position (`plan.run.row_multiple_of`).
    """
    length = _round_up(max(1, max(map(len, samples))), pad_to_multiple_of)
    starts = range(0, len(samples) * length, length)
    position_ids_BS = torch.arange(length).repeat(len(samples), 1)
    return _lay_out(samples, starts, position_ids_BS, pad_token_id, num_drafts)


def pair_up(batch: Batch, pairs: Sequence[Sample]) -> Batch:
    """The batch of both answers of these pairs, one pair after the other, with what a reference says of them.

    MTP heads learn from the preferred answers alone: of the others their labels are taken out.
    """
    is_rejected_BS = batch.sequence_KBS[0] % 2 == 1
    reference_P2 = torch.tensor([pair.reference for pair in pairs], dtype=torch.float32)
    return replace(_without_heads(batch, is_rejected_BS), reference_P2=reference_P2)


def rate(batch: Batch, samples: Sequence[Sample]) -> Batch:
    """Return the batch of these samples, with what is said of them.

    MTP heads learn from the good answers alone.
    """
    reference_P2 = torch.tensor([sample.reference for sample in samples], dtype=torch.float32)
    desirable_P = torch.tensor([bool(sample.desirable) for sample in samples])
    sequence_BS = batch.sequence_KBS[0]
    is_bad_BS = ~desirable_P[sequence_BS.clamp(min=0)] & (sequence_BS >= 0)
    return replace(_without_heads(batch, is_bad_BS), reference_P2=reference_P2, desirable_P=desirable_P)


def compare(batch: Batch, samples: Sequence[Sample]) -> Batch:
    """Return the batch of the mismatched answers of these samples, with what a reference says of them.

    It is only scored: without labels MTP heads compute no loss.
    """
    reference_P2 = torch.tensor([sample.reference for sample in samples], dtype=torch.float32).view(-1, 2)
    is_idle_BS = torch.ones_like(batch.position_ids_BS, dtype=torch.bool)
    return replace(_without_heads(batch, is_idle_BS), reference_P2=reference_P2)


def _without_heads(batch: Batch, is_idle_BS: torch.Tensor) -> Batch:
    """The batch without labels of MTP heads at these tokens."""
    is_idle_KBS = is_idle_BS.repeat(len(batch.labels_KBS), 1, 1)
    is_idle_KBS[0] = False
    return replace(
        batch,
        labels_KBS=batch.labels_KBS.masked_fill(is_idle_KBS, IGNORED),
        loss_scale_KBS=batch.loss_scale_KBS.masked_fill(is_idle_KBS, 0),
    )


def collate_packed(
    samples: Sequence[Sample],
    pad_token_id: int,
    *,
    num_drafts: int = 0,
    pad_each_to_multiple_of: int = 1,
    pad_to_multiple_of: int = 1,
) -> Batch:
    """One row of all samples, each a sequence padded for itself; what fills the row up is a sequence of its own.

    Args:
        samples: none gives a row of padding.
        pad_token_id: any token of the vocabulary; no other sequence sees it.
        pad_each_to_multiple_of: so that context-parallel ranks can share each sequence
            (`plan.layout.sequence_multiple`).
        pad_to_multiple_of: what the length of the row divides by, a multiple of the former
            (`plan.run.row_multiple_of`).

    Example: samples of 3 and 1 tokens, each padded to a multiple of 2, the row to one of 8. The sequences have 4, 2 and
    2 tokens, the last of padding alone: `cu_seqlens` is 0, 4, 6, 8 and positions are 0, 1, 2, 3, 0, 1, 0, 1.
    """
    assert pad_to_multiple_of % pad_each_to_multiple_of == 0
    lengths = [_round_up(len(sample), pad_each_to_multiple_of) for sample in samples]
    num_tokens = sum(lengths)
    rest = _round_up(max(1, num_tokens), pad_to_multiple_of) - num_tokens
    if rest:
        lengths.append(rest)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    starts = cu_seqlens[:-1]
    positions_in_row = torch.arange(sum(lengths))
    position_ids_BS = (positions_in_row - starts.repeat_interleave(cu_seqlens.diff()))[None]
    return _lay_out(samples, starts.tolist(), position_ids_BS, pad_token_id, num_drafts, cu_seqlens.int())


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _lay_out(
    samples: Sequence[Sample],
    starts: Sequence[int],
    position_ids_BS: torch.Tensor,
    pad_token_id: int,
    num_drafts: int,
    cu_seqlens: torch.Tensor | None = None,
) -> Batch:
    """Each sample at its start, counted over all rows one after the other, and padding around them."""
    num_tokens = position_ids_BS.numel()
    tokens = np.full(num_tokens, pad_token_id, np.int64)
    labels = np.full(num_tokens, IGNORED, np.int64)
    loss_scale = np.zeros(num_tokens, np.float32)
    sequence = np.full(num_tokens, -1, np.int64)
    # A packed row may have one more start, for its padding.
    for number, (start, sample) in enumerate(zip(starts, samples, strict=False)):
        here = slice(start, start + len(sample))
        tokens[here] = sample.input_ids
        labels[here] = sample.labels
        loss_scale[here] = np.where(sample.labels == IGNORED, 0, sample.loss_scale)
        sequence[here] = number

    def rows(array: np.ndarray, num_shifts: int, fill: float) -> torch.Tensor:
        """[1 + num_shifts, B, S]."""
        return ahead(torch.from_numpy(array).view_as(position_ids_BS), num_shifts, fill, cu_seqlens)

    return Batch(
        tokens_KBS=rows(tokens, num_drafts, fill=0),
        labels_KBS=rows(labels, num_drafts + 1, fill=IGNORED)[1:],  # the trunk itself predicts one token ahead
        loss_scale_KBS=rows(loss_scale, num_drafts + 1, fill=0)[1:],
        position_ids_BS=position_ids_BS,
        sequence_KBS=rows(sequence, num_drafts, fill=-1),
        num_tokens=sum(map(len, samples)),
        squares=sum(len(sample) ** 2 for sample in samples),
        cu_seqlens=cu_seqlens,
    )
