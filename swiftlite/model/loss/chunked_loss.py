"""Compute the losses of `losses.py` from hidden states, so that only one chunk of logits is in memory at a time.

The forward pass computes the logits of a chunk, then its losses and predictions, and overwrites the logits with their
gradient, which is multiplied by both factors of the logits: once for the gradient of the states, once for the gradient
of the output matrix, if it is trained. The latter is a sum over positions, so the weight of each position in the loss
must be known.

- Supervised methods know the weights before the forward pass. `_WeightedLoss` returns the weighted sum. It computes the
  gradient of the output matrix in the forward pass.
- In DPO, KTO and GRPO, and with `--mtp_unroll_weights joint`, weights depend on the losses. `_ChunkedLoss` returns the
  loss of each position. The backward pass multiplies the gradient of each state by the position's weight, and computes
  the logits of each chunk again for the gradient of a trained output matrix. With 8,192 positions and a vocabulary of
  150,000, this costs one more matrix product (1/40 of the work of an 8B model) and saves 5 GB.

Both add the gradient of the matrix to a `main_grad` in float32. Otherwise they sum it in float32, and autograd gets it.

Shapes: B batch, S sequence, N selected tokens, C of them in a chunk, V vocabulary on this rank, H hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from swiftlite.model.layers.compiled import compiled
from swiftlite.model.layers.tensor_parallel import add_product_
from swiftlite.model.loss.clusters import TokenClusters
from swiftlite.model.loss.losses import (
    Distance,
    Group,
    Selected,
    TokenLoss,
    compare_,
    cross_entropy_,
    distance_of,
    entropy,
    entropy_,
    laid_out,
    overlap_of,
    sharing,
    vocab_parallel_argmax,
)
from swiftlite.plan.kernels import CHUNK

Results = tuple[torch.Tensor, torch.Tensor | None]
"""Losses [C] of a chunk, and the row of the output matrix with the largest logit, int64 [C]; None if the rows are split
over ranks."""


@dataclass(frozen=True)
class Chunk:
    """Some of the positions.

    Attributes:
        rows: their numbers.
        logits_CV: their logits, which `loss_` of a target overwrites with their gradient.
        group: ranks that share the vocabulary; None if this rank has all of it.
        share_C1: factor of each position's gradient; None for 1.
    """

    rows: slice
    logits_CV: torch.Tensor
    group: Group
    share_C1: torch.Tensor | None = None


@dataclass(frozen=True)
class LabelTarget:
    """Cross-entropy with labels [N].

    Attributes:
        entropy_N: filled with the entropy of each position's distribution; None if it is not requested.
    """

    label_N: torch.Tensor
    entropy_N: torch.Tensor | None = None

    def loss_(self, chunk: Chunk) -> Results:
        """Return the losses [C] of a chunk in float32 and where its logits are largest, and overwrite the logits with
        the gradient."""
        label_C = self.label_N[chunk.rows]
        if self.entropy_N is not None and chunk.share_C1 is None:  # not again for the gradient of the output matrix
            function = _fused_entropy if chunk.group is None else entropy
            self.entropy_N[chunk.rows] = function(chunk.logits_CV, chunk.group)
        if chunk.group is not None:
            return _cross_entropy_(chunk.logits_CV, label_C, chunk.share_C1, chunk.group), None
        logit_C1 = chunk.logits_CV.gather(1, label_C[:, None])
        return _fused_cross_entropy_(chunk.logits_CV, logit_C1, label_C, chunk.share_C1)


@dataclass(frozen=True)
class EntropyTarget:
    """The entropy of each position's distribution, which has a gradient, unlike that of a `LabelTarget`."""

    def loss_(self, chunk: Chunk) -> Results:
        """Return the entropies [C] of a chunk, as `LabelTarget.loss_`."""
        best_C = chunk.logits_CV.argmax(dim=-1) if chunk.group is None else None
        wide_CV = chunk.logits_CV.float()
        entropy_C = entropy_(wide_CV, chunk.group)
        _put_(wide_CV, chunk.share_C1, chunk.logits_CV)
        return entropy_C, best_C


@dataclass(frozen=True)
class TrunkTarget:
    """A distance from the trunk's distribution.

    Attributes:
        trunk_NH: states of the trunk, from which the distribution is computed.
        output_VH: the trunk's output matrix, or its rows of the draft vocabulary.
        cap: as for `capped`.
        overlap_N: filled with the overlap of both distributions; None if it is not requested.
    """

    trunk_NH: torch.Tensor
    distance: Distance
    output_VH: torch.Tensor
    cap: float | None = None
    overlap_N: torch.Tensor | None = None

    def loss_(self, chunk: Chunk) -> Results:
        """Return the distances [C] of a chunk, as `LabelTarget.loss_`."""
        # For each chunk separately: logits of all positions would take the memory that chunks save.
        trunk_CV = capped(self.trunk_NH[chunk.rows] @ self.output_VH.t(), self.cap)
        overlap_C = None
        if self.overlap_N is not None and chunk.share_C1 is None:
            overlap_C = self.overlap_N[chunk.rows]
        return _distance_of_chunk_(chunk, trunk_CV, self.distance, overlap_C=overlap_C)


@dataclass(frozen=True)
class TeacherTarget:
    """The generalized Jensen-Shannon divergence from a teacher's distribution.

    Attributes:
        teacher_NH: final states of the teacher, whose hidden size H can differ from that of the trained model.
        output_VH: this rank's part of the teacher's output matrix.
        beta: weight of the teacher in the mixture, see `distillation_loss`.
        cap: as for `capped`.
    """

    teacher_NH: torch.Tensor
    output_VH: torch.Tensor
    beta: float
    cap: float | None = None

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
        return capped(self.teacher_NH[rows] @ self.output_VH.t(), self.cap)

    def loss_(self, chunk: Chunk) -> Results:
        """Return the divergences [C] of a chunk, as `LabelTarget.loss_`."""
        return _distance_of_chunk_(chunk, self.logits(chunk.rows), self.distance, self.weight)


def _cross_entropy_(
    logits_CV: torch.Tensor, label_C: torch.Tensor, share_C1: torch.Tensor | None, group: Group
) -> torch.Tensor:
    wide_CV = logits_CV.float()
    loss_C = cross_entropy_(wide_CV, label_C, group)
    _put_(wide_CV, share_C1, logits_CV)
    return loss_C


def _whole_cross_entropy_(
    logits_CV: torch.Tensor, logit_C1: torch.Tensor, label_C: torch.Tensor, share_C1: torch.Tensor | None
) -> Results:
    """Compute `_cross_entropy_` and the largest logits if this rank has the whole vocabulary.

    Compiled, this is one kernel without a temporary tensor of the logits' size. It uses no scatter, and computes the
    exponentials twice instead of storing them.

    Args:
        logit_C1: the logit of each label. It is not read here, because the compiler of torch 2.11 reads it from logits
            that are already overwritten.
    """
    best_C = logits_CV.argmax(dim=-1)
    if not torch.compiler.is_compiling():
        return _cross_entropy_(logits_CV, label_C, share_C1, None), best_C
    wide_CV = logits_CV.float()
    largest_C1 = wide_CV.amax(dim=-1, keepdim=True)
    log_sum_C1 = (wide_CV - largest_C1).exp().sum(dim=-1, keepdim=True).log() + largest_C1
    word_V = torch.arange(logits_CV.size(1), device=logits_CV.device)
    is_label_CV = word_V == label_C[:, None]
    gradient_CV = (wide_CV - log_sum_C1).exp() - is_label_CV.float()
    _put_(gradient_CV, share_C1, logits_CV)
    return (log_sum_C1 - logit_C1.float())[:, 0], best_C


def _distance_of_chunk_(
    chunk: Chunk,
    trunk_CV: torch.Tensor,
    distance: Distance,
    beta: torch.Tensor | None = None,
    overlap_C: torch.Tensor | None = None,
) -> Results:
    """Call `_distance_`, compiled if this rank has the whole vocabulary."""
    function = _fused_distance_ if chunk.group is None else _distance_
    torch._dynamo.mark_static(trunk_CV, 1)
    return function(chunk.logits_CV, trunk_CV, distance, chunk.share_C1, chunk.group, beta, overlap_C)


def _distance_(
    logits_CV: torch.Tensor,
    trunk_CV: torch.Tensor,
    distance: Distance,
    share_C1: torch.Tensor | None,
    group: Group,
    beta: torch.Tensor | None = None,
    overlap_C: torch.Tensor | None = None,
) -> Results:
    best_C = logits_CV.argmax(dim=-1) if group is None else None
    wide_CV = logits_CV.float()
    # Float32 logits are not copied by `float`, so their largest values are found before.
    loss_C = compare_(wide_CV, trunk_CV.float(), distance, group, beta)
    if overlap_C is not None:
        overlap_C.copy_(overlap_of(distance, loss_C, wide_CV, group))
    _put_(wide_CV, share_C1, logits_CV)
    return loss_C, best_C


def _put_(gradient_CV: torch.Tensor, share_C1: torch.Tensor | None, logits_CV: torch.Tensor) -> None:
    if share_C1 is not None:
        gradient_CV.mul_(share_C1)
    logits_CV.copy_(gradient_CV)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return `cap * tanh(logits / cap)`; without a cap, the logits."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _cap_(logits_CV: torch.Tensor, cap: float) -> torch.Tensor:
    """Overwrite logits with `capped` logits, and return the derivative [C, V]."""
    # In float32: in bfloat16, 1 - tanh ** 2 would be 0 or a multiple of 2 ** -8 near the cap.
    share_CV = torch.tanh(logits_CV.float() / cap)
    logits_CV.copy_(share_CV * cap)
    return (1 - share_CV * share_CV).to(logits_CV.dtype)


# On a GPU with the whole vocabulary on one rank, all passes over the logits are one kernel, which reads and writes them
# in the model's precision. If ranks share the vocabulary, passes are separate, because ranks exchange values between
# them.
_fused_cross_entropy_ = compiled(_whole_cross_entropy_)
_fused_distance_ = compiled(_distance_)
_fused_entropy = compiled(entropy)
_fused_cap_ = compiled(_cap_)

Target = LabelTarget | EntropyTarget | TrunkTarget | TeacherTarget


def chunked_loss(
    states_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    target: Target,
    selected: Selected,
    tp_group: dist.ProcessGroup,
    tokens_V: torch.Tensor | None = None,
    share_BS: torch.Tensor | None = None,
    *,
    frozen_VH: torch.Tensor | None = None,
    cap: float | None = None,
    clusters: TokenClusters | None = None,
    returns_gradient: bool = True,
) -> TokenLoss:
    """Return the result of `token_loss` or `distillation_loss` for the logits `states_NH @ weight_VH.T`.

    Args:
        weight_VH: this rank's part of the output matrix.
        selected: the positions in the micro-batch that `states_NH` belong to, and their labels.
        tokens_V: the token of each row of the matrix, for a draft vocabulary; None for the whole vocabulary.
        share_BS: weight of each position, if it is known. With it, and if the matrix is trained, only the weighted sum
            `TokenLoss.total` has a gradient. The derivative of the loss with respect to it must be 1: megatron-core's
            schedules do not scale losses in bfloat16 and float32.
        frozen_VH: columns of the matrix before those of `weight_VH`, which get no gradient. The states have columns for
            both.
        cap: as for `capped`.
        clusters: of which only the selected ones are predicted; the loss is that of all tokens.
        returns_gradient: whether autograd must receive a gradient of the matrix although it was added to `main_grad`.
    """
    logits = _Logits(weight_VH, target, sharing(tp_group), tokens_V, cap, frozen_VH, clusters)
    entropy_N = target.entropy_N if isinstance(target, LabelTarget) else None
    overlap_N = target.overlap_N if isinstance(target, TrunkTarget) else None
    total = None
    # Without a gradient of the matrix, `_ChunkedLoss` computes logits only once as well, and needs no weights.
    if share_BS is not None and weight_VH.requires_grad and torch.is_grad_enabled():
        share_N1 = share_BS[selected.row_N, selected.pos_N][:, None]
        assert entropy_N is None, "filled only where weights are not known"
        assert overlap_N is None, "filled only where weights are not known"
        results: Any = _WeightedLoss.apply(states_NH, weight_VH, logits, share_N1, returns_gradient)
        total, loss_N, prediction_N = results
    else:
        results = _ChunkedLoss.apply(states_NH, weight_VH, logits, returns_gradient)
        loss_N, prediction_N = results
    return laid_out(loss_N, prediction_N, selected, entropy_N, overlap_N, total)


@dataclass(frozen=True)
class _Logits:
    """The logits of all positions, of which one chunk is computed at a time. The fields are arguments of
    `chunked_loss`."""

    weight_VH: torch.Tensor
    target: Target
    group: Group
    tokens_V: torch.Tensor | None
    cap: float | None
    frozen_VH: torch.Tensor | None
    clusters: TokenClusters | None

    def product(self, states_NH: torch.Tensor) -> torch.Tensor:
        """Return the logits of some states, without the cap."""
        if self.frozen_VH is None:
            return states_NH @ self.weight_VH.t()
        frozen_NH, trained_NH = self._split(states_NH)
        # In place, without a second tensor of the logits' size.
        return (frozen_NH @ self.frozen_VH.t()).addmm_(trained_NH, self.weight_VH.t())

    def put_gradient_(self, grad_CV: torch.Tensor, grad_CH: torch.Tensor) -> None:
        """Overwrite `grad_CH` with the gradient of the states of a chunk, without a sum over ranks.

        Args:
            grad_CV: gradient of its logits.
        """
        if self.frozen_VH is None:
            torch.matmul(grad_CV, self.weight_VH, out=grad_CH)
            return
        frozen_CH, trained_CH = self._split(grad_CH)
        frozen_CH.copy_(grad_CV @ self.frozen_VH)
        trained_CH.copy_(grad_CV @ self.weight_VH)

    def trained(self, states_NH: torch.Tensor) -> torch.Tensor:
        """Return the columns of states that are multiplied by `weight_VH`."""
        return states_NH if self.frozen_VH is None else self._split(states_NH)[1]

    def _split(self, states_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.frozen_VH is not None
        width = self.frozen_VH.size(1)
        return states_NH[:, :width], states_NH[:, width:]

    def chunk(
        self, states_NH: torch.Tensor, rows: slice, share_N1: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradient of the logits [C, V] of a chunk, its losses and its predictions [C].

        Args:
            rows: positions of the chunk.
            share_N1: factor of each position's gradient; None for 1.
        """
        logits_CV = self.product(states_NH[rows])
        # The kernels read whole rows, in wide loads if they know the distance between rows.
        torch._dynamo.mark_static(logits_CV, 1)
        share_C1 = None if share_N1 is None else share_N1[rows]
        # Derivative of the cap, by which the chain rule multiplies the gradient below.
        slope_CV = None
        if self.cap is not None:
            slope_CV = _fused_cap_(logits_CV, self.cap)
        prediction_C = None
        # Predictions come first, because `loss_` overwrites the logits.
        if self.clusters is not None:
            shown_CV = self.clusters.masked(logits_CV, states_NH[rows], self.group)
            prediction_C = vocab_parallel_argmax(shown_CV, self.group, self.tokens_V)
        elif self.group is not None:
            prediction_C = vocab_parallel_argmax(logits_CV, self.group, self.tokens_V)
        loss_C, row_C = self.target.loss_(Chunk(rows, logits_CV, self.group, share_C1))
        if slope_CV is not None:
            logits_CV.mul_(slope_CV)
        if prediction_C is None:
            assert row_C is not None
            prediction_C = row_C if self.tokens_V is None else self.tokens_V[row_C]
        return logits_CV, loss_C, prediction_C


class _WeightedLoss(torch.autograd.Function):
    """Computes the sum of weighted losses, which has a gradient, losses [N] and predictions [N]."""

    @staticmethod
    def forward(
        ctx,
        states_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        logits: _Logits,
        share_N1: torch.Tensor,
        returns_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        loss_N, prediction_N, grad_NH = _results(states_NH, ctx.needs_input_grad[0])
        sum_VH, is_main_grad = _sum_of_matrix(weight_VH)

        def compute(rows: slice) -> None:  # a function, so that a chunk is freed at its end
            grad_CV, loss_N[rows], prediction_N[rows] = logits.chunk(states_NH, rows, share_N1)
            if grad_NH is not None:
                logits.put_gradient_(grad_CV, grad_NH[rows])
            add_product_(sum_VH, grad_CV.t(), logits.trained(states_NH[rows]))

        for rows in _chunks(len(states_NH)):
            compute(rows)
        # The single losses are only for metrics: the matrix has its gradient of their weighted sum already.
        ctx.mark_non_differentiable(loss_N, prediction_N)
        # What `main_grad` has already is not returned a second time.
        ctx.save_for_backward(grad_NH, None if is_main_grad else sum_VH)
        ctx.weight_VH, ctx.group, ctx.returns_gradient = weight_VH, logits.group, returns_gradient
        return (loss_N * share_N1[:, 0]).sum(), loss_N, prediction_N

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_NH, sum_VH = ctx.saved_tensors
        if grad_NH is not None:
            grad_NH = _over_ranks(grad_NH * grad_outputs[0], ctx.group)
        if sum_VH is not None:
            sum_VH = sum_VH * grad_outputs[0]
        return grad_NH, _returned(sum_VH, ctx.weight_VH, ctx.returns_gradient), None, None, None


class _ChunkedLoss(torch.autograd.Function):
    """Computes losses [N] and predictions [N]."""

    @staticmethod
    def forward(
        ctx, states_NH: torch.Tensor, weight_VH: torch.Tensor, logits: _Logits, returns_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss_N, prediction_N, grad_NH = _results(states_NH, ctx.needs_input_grad[0])

        def compute(rows: slice) -> None:
            grad_CV, loss_N[rows], prediction_N[rows] = logits.chunk(states_NH, rows)
            if grad_NH is not None:
                logits.put_gradient_(grad_CV, grad_NH[rows])

        for rows in _chunks(len(states_NH)):
            compute(rows)
        ctx.mark_non_differentiable(prediction_N)
        # Only for the gradient of the matrix, whose logits are computed again.
        kept_states_NH = states_NH if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(grad_NH, kept_states_NH)
        ctx.logits, ctx.returns_gradient = logits, returns_gradient
        return loss_N, prediction_N

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_NH, states_NH = ctx.saved_tensors
        # The gradient of the loss of a position is its weight.
        share_N1 = grad_outputs[0][:, None]
        if grad_NH is not None:
            grad_NH = _over_ranks((grad_NH * share_N1).to(grad_NH.dtype), ctx.logits.group)
        grad_VH = None
        if states_NH is not None:
            grad_VH = _matrix_gradient(states_NH, share_N1, ctx.logits, ctx.returns_gradient)
        return grad_NH, grad_VH, None, None


def _matrix_gradient(
    states_NH: torch.Tensor, share_N1: torch.Tensor, logits: _Logits, returns_gradient: bool
) -> torch.Tensor | None:
    """Compute the gradient of the output matrix [V, H] from recomputed logits; return what autograd gets of it."""
    sum_VH, is_main_grad = _sum_of_matrix(logits.weight_VH)

    def add(rows: slice) -> None:
        grad_CV, _, _ = logits.chunk(states_NH, rows, share_N1)
        add_product_(sum_VH, grad_CV.t(), logits.trained(states_NH[rows]))

    for rows in _chunks(len(states_NH)):
        add(rows)
    return _returned(None if is_main_grad else sum_VH, logits.weight_VH, returns_gradient)


def _sum_of_matrix(weight_VH: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return the tensor to which chunks add the gradient of the output matrix in float32, and whether it is
    `main_grad`."""
    main_grad_VH: Any = getattr(weight_VH, "main_grad", None)
    if main_grad_VH is not None and main_grad_VH.dtype == torch.float32:
        return main_grad_VH, True
    # A sum over chunks in bfloat16 would lose small terms, so it is float32, and converted once at the end.
    return torch.zeros_like(weight_VH, dtype=torch.float32), False


def _returned(sum_VH: torch.Tensor | None, weight_VH: torch.Tensor, returns_gradient: bool) -> torch.Tensor | None:
    """Return the gradient of the output matrix for autograd.

    Args:
        sum_VH: the gradient; None if it was added to `main_grad`.
    """
    if sum_VH is not None:
        return sum_VH.to(weight_VH.dtype)
    if returns_gradient:
        # With --overlap_grad_reduce, DistributedDataParallel's hook requires a gradient, and adds these zeros.
        return weight_VH.new_zeros(()).expand_as(weight_VH)
    return None


def _results(states_NH: torch.Tensor, learns: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return memory for losses [N], predictions [N], and the gradient of the states, if they get one."""
    loss_N = states_NH.new_zeros(len(states_NH), dtype=torch.float32)
    prediction_N = torch.zeros(len(states_NH), dtype=torch.int64, device=states_NH.device)
    return loss_N, prediction_N, torch.empty_like(states_NH) if learns else None


def _over_ranks(grad_NH: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the gradient of the states over ranks, each of which has the part of its vocabulary."""
    if group is not None:
        # Once for all chunks, and only if there is a backward pass.
        dist.all_reduce(grad_NH, group=group)
    return grad_NH


def _chunks(number: int) -> Iterator[slice]:
    for start in range(0, number, CHUNK):
        yield slice(start, start + CHUNK)
