"""Compute the losses of `losses.py` from hidden states, so that only one chunk of logits is in memory at a time.

The forward pass computes the logits of a chunk, then its losses, and overwrites the logits with their gradient. It
stores only the gradient with respect to the states. The weight of each position in the loss is known only in the
backward pass. There, the stored gradient of each position is multiplied by the position's weight. The gradient of the
output matrix is a sum over positions and could not be corrected afterwards. Therefore, if the matrix is trained, the
backward pass computes the logits of each chunk again. With 8,192 positions and a vocabulary of 150,000, this costs one
more matrix product (1/30 of the work of an 8B model) and saves 5 GB.

Shapes: B batch, S sequence, N selected tokens, C of them in a chunk, V vocabulary on this rank, H hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from swiftlite.model.layers.compiled import compiled
from swiftlite.model.loss.losses import (
    Distance,
    Group,
    Selected,
    TokenLoss,
    compare_,
    cross_entropy_,
    distance_of,
    entropy,
    laid_out,
    overlap_of,
    sharing,
    vocab_parallel_argmax,
)
from swiftlite.plan.kernels import CHUNK


@dataclass(frozen=True)
class LabelTarget:
    """Cross-entropy with labels [N].

    Attributes:
        entropy_N: filled with the entropy of each position's distribution; None if it is not requested.
    """

    label_N: torch.Tensor
    entropy_N: torch.Tensor | None = None

    def loss_(
        self,
        logits_CV: torch.Tensor,
        rows: slice,
        weight_VH: torch.Tensor,
        group: Group,
        share_C1: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the losses [C] of a chunk in float32, and overwrite its logits with the gradient.

        Args:
            rows: positions of the chunk.
            weight_VH: the output matrix.
            share_C1: factor of each position's gradient; None for 1.
        """
        label_C = self.label_N[rows]
        if self.entropy_N is not None and share_C1 is None:  # not again for the gradient of the output matrix
            function = _fused_entropy if group is None else entropy
            self.entropy_N[rows] = function(logits_CV, group)
        if group is not None:
            return _cross_entropy_(logits_CV, label_C, share_C1, group)
        logit_C1 = logits_CV.gather(1, label_C[:, None])
        return _fused_cross_entropy_(logits_CV, logit_C1, label_C, share_C1)


@dataclass(frozen=True)
class TrunkTarget:
    """A distance from the trunk's distribution.

    Attributes:
        trunk_NH: states of the trunk, from which the distribution is computed.
        output_VH: the trunk's output matrix, or its rows of the draft vocabulary.
        overlap_N: filled with the overlap of both distributions; None if it is not requested.
    """

    trunk_NH: torch.Tensor
    distance: Distance
    output_VH: torch.Tensor
    overlap_N: torch.Tensor | None = None

    def loss_(
        self,
        logits_CV: torch.Tensor,
        rows: slice,
        weight_VH: torch.Tensor,
        group: Group,
        share_C1: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the distances [C] of a chunk in float32, and overwrite its logits with the gradient.

        The arguments are those of `LabelTarget.loss_`.
        """
        trunk_CV = self.trunk_NH[rows] @ self.output_VH.t()
        overlap_C = None
        if self.overlap_N is not None and share_C1 is None:
            overlap_C = self.overlap_N[rows]
        return _distance_of_chunk_(logits_CV, trunk_CV, self.distance, share_C1, group, overlap_C=overlap_C)


@dataclass(frozen=True)
class TeacherTarget:
    """The generalized Jensen-Shannon divergence from a teacher's distribution.

    Attributes:
        teacher_NH: final states of the teacher, whose hidden size H can differ from that of the trained model.
        output_VH: this rank's part of the teacher's output matrix.
        beta: weight of the teacher in the mixture, see `distillation_loss`.
    """

    teacher_NH: torch.Tensor
    output_VH: torch.Tensor
    beta: float

    @property
    def distance(self) -> Distance:
        """The kind of `distillation_loss`."""
        return distance_of(self.beta)

    @property
    def weight(self) -> torch.Tensor:
        """`beta` as a tensor."""
        return torch.full((), self.beta, device=self.teacher_NH.device)

    def logits(self, rows: slice) -> torch.Tensor:
        """Return the teacher's logits at some positions."""
        return self.teacher_NH[rows] @ self.output_VH.t()

    def loss_(
        self,
        logits_CV: torch.Tensor,
        rows: slice,
        weight_VH: torch.Tensor,
        group: Group,
        share_C1: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the divergences [C] of a chunk in float32, and overwrite its logits with the gradient.

        The arguments are those of `LabelTarget.loss_`.
        """
        return _distance_of_chunk_(logits_CV, self.logits(rows), self.distance, share_C1, group, self.weight)


def _cross_entropy_(
    logits_CV: torch.Tensor, label_C: torch.Tensor, share_C1: torch.Tensor | None, group: Group
) -> torch.Tensor:
    wide_CV = logits_CV.float()
    loss_C = cross_entropy_(wide_CV, label_C, group)
    _put_(wide_CV, share_C1, logits_CV)
    return loss_C


def _whole_cross_entropy_(
    logits_CV: torch.Tensor, logit_C1: torch.Tensor, label_C: torch.Tensor, share_C1: torch.Tensor | None
) -> torch.Tensor:
    """Compute `_cross_entropy_` if this rank has the whole vocabulary.

    Compiled, this is one kernel without a temporary tensor of the logits' size. It uses no scatter, and computes the
    exponentials twice instead of storing them.

    Args:
        logit_C1: the logit of each label. It is not read here, because the compiler of torch 2.11 reads it from logits
            that are already overwritten.
    """
    if not torch.compiler.is_compiling():
        return _cross_entropy_(logits_CV, label_C, share_C1, None)
    wide_CV = logits_CV.float()
    largest_C1 = wide_CV.amax(dim=-1, keepdim=True)
    log_sum_C1 = (wide_CV - largest_C1).exp().sum(dim=-1, keepdim=True).log() + largest_C1
    word_V = torch.arange(logits_CV.size(1), device=logits_CV.device)
    is_label_CV = word_V == label_C[:, None]
    gradient_CV = (wide_CV - log_sum_C1).exp() - is_label_CV.float()
    _put_(gradient_CV, share_C1, logits_CV)
    return (log_sum_C1 - logit_C1.float())[:, 0]


def _distance_of_chunk_(
    logits_CV: torch.Tensor,
    trunk_CV: torch.Tensor,
    distance: Distance,
    share_C1: torch.Tensor | None,
    group: Group,
    beta: torch.Tensor | None = None,
    overlap_C: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call `_distance_`, compiled if this rank has the whole vocabulary."""
    function = _fused_distance_ if group is None else _distance_
    return function(logits_CV, trunk_CV, distance, share_C1, group, beta, overlap_C)


def _distance_(
    logits_CV: torch.Tensor,
    trunk_CV: torch.Tensor,
    distance: Distance,
    share_C1: torch.Tensor | None,
    group: Group,
    beta: torch.Tensor | None = None,
    overlap_C: torch.Tensor | None = None,
) -> torch.Tensor:
    wide_CV = logits_CV.float()
    loss_C = compare_(wide_CV, trunk_CV.float(), distance, group, beta)
    if overlap_C is not None:
        overlap_C.copy_(overlap_of(distance, loss_C, wide_CV, group))
    _put_(wide_CV, share_C1, logits_CV)
    return loss_C


def _put_(gradient_CV: torch.Tensor, share_C1: torch.Tensor | None, logits_CV: torch.Tensor) -> None:
    if share_C1 is not None:
        gradient_CV.mul_(share_C1)
    logits_CV.copy_(gradient_CV)


# On a GPU with the whole vocabulary on one rank, all passes over the logits are one kernel, which reads and writes them
# in the model's precision. If ranks share the vocabulary, passes are separate, because ranks exchange values between
# them.
_fused_cross_entropy_ = compiled(_whole_cross_entropy_)
_fused_distance_ = compiled(_distance_)
_fused_entropy = compiled(entropy)

Target = LabelTarget | TrunkTarget | TeacherTarget


def chunked_loss(
    states_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    target: Target,
    selected: Selected,
    tp_group: dist.ProcessGroup,
    tokens_V: torch.Tensor | None = None,
) -> TokenLoss:
    """Return the result of `token_loss` or `distillation_loss` for the logits `states_NH @ weight_VH.T`.

    Args:
        weight_VH: this rank's part of the output matrix.
        selected: the positions in the micro-batch that `states_NH` belong to, and their labels.
        tokens_V: the token of each row of the matrix, for a draft vocabulary; None for the whole vocabulary.
    """
    results: Any = _ChunkedLoss.apply(states_NH, weight_VH, target, sharing(tp_group), tokens_V)
    loss_N, prediction_N = results
    entropy_N = target.entropy_N if isinstance(target, LabelTarget) else None
    overlap_N = target.overlap_N if isinstance(target, TrunkTarget) else None
    return laid_out(loss_N, prediction_N, selected, entropy_N, overlap_N)


class _ChunkedLoss(torch.autograd.Function):
    """Computes losses [N] and predictions [N]."""

    @staticmethod
    def forward(
        ctx,
        states_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        target: Target,
        group: Group,
        tokens_V: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss_N = states_NH.new_zeros(len(states_NH), dtype=torch.float32)
        prediction_N = torch.zeros(len(states_NH), dtype=torch.int64, device=states_NH.device)
        grad_NH = torch.empty_like(states_NH) if ctx.needs_input_grad[0] else None

        def compute(rows: slice) -> None:  # a function, so that a chunk is freed at its end
            logits_CV = states_NH[rows] @ weight_VH.t()
            prediction_N[rows] = vocab_parallel_argmax(logits_CV, group, tokens_V)
            loss_N[rows] = target.loss_(logits_CV, rows, weight_VH, group)
            if grad_NH is not None:
                torch.matmul(logits_CV, weight_VH, out=grad_NH[rows])

        for rows in _chunks(len(states_NH)):
            compute(rows)
        ctx.mark_non_differentiable(prediction_N)
        kept_states_NH = states_NH if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(grad_NH, kept_states_NH)
        ctx.weight_VH, ctx.target, ctx.group = weight_VH, target, group
        return loss_N, prediction_N

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_NH, states_NH = ctx.saved_tensors
        share_N1 = grad_outputs[0][:, None]
        if grad_NH is not None:
            grad_NH = (grad_NH * share_N1).to(grad_NH.dtype)
            if ctx.group is not None:
                dist.all_reduce(grad_NH, group=ctx.group)  # each rank has the part of its vocabulary
        grad_VH = None
        if states_NH is not None:
            grad_VH = _matrix_gradient(states_NH, share_N1, ctx.weight_VH, ctx.target, ctx.group)
        return grad_NH, grad_VH, None, None, None


def _matrix_gradient(
    states_NH: torch.Tensor,
    share_N1: torch.Tensor,
    weight_VH: torch.Tensor,
    target: Target,
    group: Group,
) -> torch.Tensor:
    """Return the gradient of the output matrix [V, H], from recomputed logits."""
    grad_VH = torch.zeros_like(weight_VH)

    def add(rows: slice) -> None:
        logits_CV = states_NH[rows] @ weight_VH.t()
        target.loss_(logits_CV, rows, weight_VH, group, share_N1[rows])
        grad_VH.addmm_(logits_CV.t(), states_NH[rows])

    for rows in _chunks(len(states_NH)):
        add(rows)
    return grad_VH


def _chunks(number: int) -> Iterator[slice]:
    for start in range(0, number, CHUNK):
        yield slice(start, start + CHUNK)
