"""Define what a forward pass reads: the tokens of a micro-batch, and what the model is compared with.

Shapes: K the number of predictions (1 for the trunk, 1 for each MTP depth), B rows, S tokens of a row on this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from swiftlite.data.batch import Batch, ahead
from swiftlite.model.context_parallel import describe_packed, padded_cu_seqlens
from swiftlite.model.loss.balance import Balance
from swiftlite.model.loss.chunked_loss import TeacherTarget
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.model.tower import TowerInputs


@dataclass(frozen=True)
class ModelInputs:
    """The tokens of a micro-batch on this rank. The names of tensors are those of megatron-core.

    There is no mask, because attention is causal and rows are padded at the end.

    Attributes:
        input_ids: [B, S].
        position_ids: [B, S].
        mtp_input_ids: for each depth k the tokens at s + k, [B, S]. Default: `input_ids`, shifted within each sequence.
            The default is for whole rows: it is wrong if context-parallel ranks split them.
        packed_seq_params: the sequences of a packed row (B = 1), between which there is no attention.
        sequences: int64 [K, B, S], `Batch.sequence_KBS`; without it routers do not count their load.
        balance: load balance of the global batch; without it routers have no load-balancing loss.
        tower_inputs: inputs of the micro-batch for a model with a tower.
        axes_3BS: int64, positions of the tokens along three axes, for rotary embeddings with sections. Default: the
            positions in the sequence.
        lengths: number of tokens of each sequence without padding, on which some rotary embeddings depend
            (`Batch.lengths`). Default: sequences have no padding.
        head_labels: int64 [K - 1, B, S], the labels of the heads, for `drafted`. Default: heads draft everywhere.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    mtp_input_ids: Sequence[torch.Tensor] | torch.Tensor | None = None
    packed_seq_params: PackedSeqParams | None = None
    sequences: torch.Tensor | None = None
    balance: Balance | None = None
    tower_inputs: TowerInputs | None = None
    axes_3BS: torch.Tensor | None = None
    lengths: Sequence[int] = ()
    head_labels: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, balance: Balance | None = None) -> "ModelInputs":
        """Return the inputs of a micro-batch, whose tensors were split over ranks."""
        return cls(
            input_ids=batch.tokens_KBS[0],
            position_ids=batch.position_ids_BS,
            mtp_input_ids=batch.tokens_KBS[1:],
            packed_seq_params=describe_packed(batch.cu_seqlens),
            sequences=batch.sequence_KBS,
            balance=balance,
            tower_inputs=TowerInputs.of(batch),
            axes_3BS=batch.axes_3BS,
            lengths=batch.lengths,
            head_labels=batch.labels_KBS[1:],
        )

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        """Starts of the padded sequences of a packed row; None for padded rows."""
        return padded_cu_seqlens(self.packed_seq_params)

    def tokens_of_heads(self, num_drafts: int) -> list[torch.Tensor]:
        """Return the tokens [B, S] of each depth."""
        if self.mtp_input_ids is not None:
            return list(self.mtp_input_ids)
        return list(ahead(self.input_ids, num_drafts, 0, self.cu_seqlens)[1:])

    def drafted(self) -> torch.Tensor | None:
        """Return the positions at which a head has a label in any row, ascending, int64 [P] on the host; the first
        position if there is no label, and None for all positions. Only block drafters need them.
        """
        if self.head_labels is None or not len(self.head_labels):
            return None
        is_drafted_S = (self.head_labels != IGNORE_INDEX).flatten(0, 1).any(dim=0).cpu()
        if not is_drafted_S.any():
            is_drafted_S[0] = True  # gradients of zero, for which megatron-core waits
        return is_drafted_S.nonzero().flatten()


@dataclass(frozen=True)
class Target:
    """Define what the predictions of a micro-batch are compared with; with a target, a forward pass returns losses.

    Attributes:
        labels: [B, S], where labels[b, s] is the token at s + 1, or IGNORE_INDEX. They should be on the host; otherwise
            the loss waits for the device (`model.loss.losses.select`).
        mtp_labels: for each depth k the tokens at s + k + 1, [B, S]. Default: `labels`, shifted within each sequence,
            which is wrong if context-parallel ranks split the row.
        teacher: predictions of a teacher at the positions with a label, from which the trunk learns instead of the
            labels; for the last pipeline stage.
        with_entropy: whether the trunk's losses have the entropy of its distributions.
        trains_entropy: whether this entropy has a gradient.
        weights: for the trunk and each depth, the weight [B, S] of each target in the loss; None if weights depend on
            losses.
    """

    labels: torch.Tensor
    mtp_labels: Sequence[torch.Tensor] | torch.Tensor | None = None
    teacher: TeacherTarget | None = None
    with_entropy: bool = False
    trains_entropy: bool = False
    weights: Sequence[torch.Tensor] | None = None

    @classmethod
    def of(
        cls,
        batch: Batch,
        teacher: TeacherTarget | None = None,
        *,
        with_entropy: bool = False,
        trains_entropy: bool = False,
        weights: Sequence[torch.Tensor] | None = None,
    ) -> "Target":
        """Return the target of a micro-batch."""
        return cls(batch.labels_KBS[0], batch.labels_KBS[1:], teacher, with_entropy, trains_entropy, weights)

    def of_depths(self, num_drafts: int, cu_seqlens: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the labels [B, S] of the trunk and of each depth."""
        if self.mtp_labels is not None:
            return [self.labels, *self.mtp_labels]
        return list(ahead(self.labels, num_drafts, IGNORE_INDEX, cu_seqlens))
