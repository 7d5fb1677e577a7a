"""Fit new heads to the trunk in closed form (`--mtp_init fit_last_layer`).

The decoder layer of a new head is a copy of a decoder layer of the trunk, in most models the last one. Two of the
head's matrices are computed from training rows, each as the solution of a least-squares problem. Depths k = 1, 2, ...
are fitted in order, because each head reads the state of the previous one.

1.  The copy needs inputs similar to those of the last layer. Its input is the output of the projection `eh_proj` [H,
    2H], which maps the embedding of a token and the state at the previous position to one state. Let a[s] be the input
    of the projection at position s, and x[s] the input of the last decoder layer:

        eh_proj = argmin over W of  sum over s of |W a[s] - x[s + k]|^2  +  RIDGE * m * |W|^2

    If the head reads features (`families/mtp_features.py`), they are further inputs of the first draft. Later drafts
    share the columns of the embedding; their columns for the state are the solution for the rest, without features.

2.  The head's output should be similar to that of the trunk. With the new projection, let u[s] be the input of
    `linear_fc2` [H, F], the output matrix of the head's MLP, y[s] the head's state before its output norm, and z[s] the
    trunk's state before its final norm. The norm divides z[s] by its root mean square r[s]:

        D = argmin over W of  sum over s of |W u[s] - (z[s + k] - y[s])|^2 / r[s + k]^2  +  RIDGE * m * |W|^2

    The solution is added to the copied matrix. This is exact where y[s] is a linear function of this matrix. The
    residual multiplier c of a family such as Granite is one factor (`linear_fc2` += D / c). A norm of the MLP's output
    is not linear, and with experts there are several matrices; such heads have only the first fit (`why_no_mlp_fit`).

m is the mean over the diagonal of the sum of products of the inputs, which makes the ridge independent of the number of
tokens and of the inputs' size. In both sums, s and s + k are tokens of the same sequence.

The effect was measured on SmolLM2-135M-Instruct with answers that it generated. Before the first step, a head with the
first fit predicts the trunk's token at 38 % of the held-out positions after 60,000 tokens of training rows; with
`--mtp_init copy_last_layer` or `random`, at less than 0.2 %. After only 15,000 tokens, the second fit increased the
tokens per decoding step, with up to three draft tokens, from 1.250 to 1.271 at temperature 0 and from 1.307 to 1.325 at
temperature 1: by 0.04 on one half of the held-out rows, and not at all on the other, which is harder to predict.

Shapes: S sequence, B batch, H hidden size, F inputs of `linear_fc2`, I inputs of the fitted layer, N tokens.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import nn
from torch.utils.hooks import RemovableHandle

from swiftlite.base.heads import MTP_FEATURES
from swiftlite.base.log import logger
from swiftlite.data.batch import Batch
from swiftlite.data.changed_samples import lengths_of
from swiftlite.data.sample import Sample
from swiftlite.families.absent import NoMlp
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import Mlp
from swiftlite.model.context_parallel import gather_sequence, sequence_lengths
from swiftlite.model.gpt import GPTModel
from swiftlite.model.ranks import all_gather_rows
from swiftlite.model.trunk import COMPUTED, ReusedTrunk, TrunkLayers
from swiftlite.runtime.compat import MTP_INNER_LAYER
from swiftlite.runtime.mesh import Mesh

TOKENS_PER_INPUT = 50
"""Number of tokens for the fit per input channel of the projection. The projection has 2H input channels, so a hidden
size of 576 requires about 60,000 tokens."""
RIDGE = 0.003
"""Regularization of both fits, relative to the mean square of an input channel."""
MAX_MLP_INPUTS = 16384
"""Maximum number of inputs of a fitted output matrix. Each rank needs 8 bytes per pair of inputs, and the same again to
solve the problem: 4.3 GB."""


def samples_to_fit(samples: Sequence[Sample], num_inputs: int) -> list[Sample]:
    """Return enough samples for the fit, spread evenly over all files; all samples if there are not enough.

    Args:
        num_inputs: input channels of the projection.
    """
    lengths, starts = lengths_of(samples)
    num_tokens = int(lengths[starts].sum())
    stride = max(num_tokens // (num_inputs * TOKENS_PER_INPUT), 1)
    return [samples[index] for index in range(0, len(samples), stride)]


def why_no_mlp_fit(block: Layer) -> str:
    """Return why the MLP of heads with this decoder layer cannot be fitted; empty if it can."""
    if isinstance(block.mlp, NoMlp):
        return "heads have no MLP"
    if not isinstance(block.mlp, Mlp):
        return "it has experts"
    if block.has_output_norms:
        return "its output is normalized"
    if block.mlp.ffn > MAX_MLP_INPUTS:
        return f"it has more than {MAX_MLP_INPUTS} channels"
    return ""


@torch.no_grad()
def fit_heads(
    chunks: Sequence[GPTModel],
    mesh: Mesh,
    batches: Sequence[Batch],
    block: Layer,
    trunk: TrunkLayers = COMPUTED,
) -> None:
    """Fit the projection of each head and the output matrix of its MLP. Collective.

    Args:
        chunks: the stages of the model on this rank. The last decoder layer and all heads must be on one stage;
            `why_no_fit` rejects other layouts.
        batches: this rank's micro-batches, the same number on every data-parallel rank.
        block: the decoder layer of the heads.
        trunk: runs the decoder layers.
    """
    for chunk in chunks:
        chunk.eval()  # disables recomputation
    runner = trunk
    if ReusedTrunk.supports(chunks, mesh, batches, trunk):
        runner = ReusedTrunk()
    of_projection = _FeatureProjectionFit if chunks[0].heads.kind == MTP_FEATURES else _ProjectionFit
    fit_kinds: list[type[_ProjectionFit] | type[_MlpFit]] = [of_projection, _MlpFit]
    if reason := why_no_mlp_fit(block):
        fit_kinds = [of_projection]
        logger.info("heads: the MLP is not fitted, because %s", reason)
    for depth in range(chunks[0].config.mtp_num_layers or 0):
        for fit_kind in fit_kinds:
            fits = [fit_kind(chunk, depth, mesh, block) for chunk in chunks if chunk.mtp_process]
            with mesh.active():
                runner.run_unlabeled(chunks, mesh, batches, fits)
            for fit in fits:
                fit.finish()
    for chunk in chunks:
        chunk.train()


class _Fit:
    """Collects the sums of a least-squares problem: inputs of a linear layer of a head, and targets from the trunk.

    Attributes:
        part: the part of the head that is fitted, for the log.
        batch: the micro-batch that the stage currently computes.
        target_SBH: states of the trunk for it, the part on this rank. None after the first draft step: with
            --mtp_unroll, a head runs once per draft step, and is fitted to the first step.
        hooks: collect inputs and targets.
    """

    part: ClassVar[str]
    batch: Batch
    target_SBH: torch.Tensor | None = None

    def __init__(self, chunk: GPTModel, depth: int, mesh: Mesh, num_inputs: int):
        self.chunk = chunk
        self.depth = depth
        self.mesh = mesh
        float64 = {"dtype": torch.float64, "device": mesh.device.torch_device}
        self.squares = torch.zeros(num_inputs, num_inputs, **float64)
        self.products = torch.zeros(num_inputs, chunk.config.hidden_size, **float64)
        self.num_tokens = torch.zeros((), **float64)
        self.hooks: list[RemovableHandle] = []

    def begin(self, batch: Batch) -> None:
        """Set the micro-batch."""
        self.batch = batch

    def see_last_input(self, hidden_SBH: torch.Tensor) -> None:
        """Set the target, if it is the input of the last decoder layer."""

    def _is_token(self) -> torch.Tensor:
        """Return which positions of the whole row have a target, bool [S, B]."""
        return all_gather_rows(self.batch.sequence_KBS[self.depth + 1], self.mesh, self.batch.cu_seqlens).T >= 0

    def _targets(self, is_token_SB: torch.Tensor) -> torch.Tensor:
        """Return the trunk's state at s + depth + 1 for each of these positions s."""
        assert self.target_SBH is not None
        # `roll` wraps states around only to masked positions, because their sequence has ended.
        target_SBH = self._whole(self.target_SBH).roll(-self.depth - 1, dims=0)
        self.target_SBH = None
        return target_SBH[is_token_SB].double()

    def _add(self, input_NI: torch.Tensor, target_NH: torch.Tensor) -> None:
        self.squares += input_NI.T @ input_NI
        self.products += input_NI.T @ target_NH
        self.num_tokens += len(input_NI)

    def _whole(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Gather whole rows from the parts of sequence- and context-parallel ranks."""
        return self._gathered(self.chunk.whole_sequence(hidden_SBH))

    def _gathered(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Gather whole rows from the parts of context-parallel ranks."""
        cp = self.mesh.cp
        if cp.size() == 1:
            return hidden_SBH
        lengths = sequence_lengths(hidden_SBH.size(0) * cp.size(), self.batch.cu_seqlens)
        return gather_sequence(hidden_SBH, lengths, cp)

    def _solve(self) -> torch.Tensor:
        """Return the solution [H, I] of the least-squares problem over the tokens of all ranks."""
        for hook in self.hooks:
            hook.remove()
        for tensor in (self.squares, self.products, self.num_tokens):
            dist.all_reduce(tensor, group=self.mesh.dp)
        logger.info("head %d: %s fitted at %d tokens", self.depth + 1, self.part, int(self.num_tokens))
        self.squares.diagonal().add_(RIDGE * self.squares.diagonal().mean())
        return torch.linalg.solve(self.squares, self.products).T


class _ProjectionFit(_Fit):
    """Fits `eh_proj` to the inputs of the last decoder layer."""

    part = "projection"

    def __init__(self, chunk: GPTModel, depth: int, mesh: Mesh, block: Layer):
        super().__init__(chunk, depth, mesh, (2 + len(chunk.heads.features)) * chunk.config.hidden_size)
        head: Any = chunk.mtp.layers[depth]
        self.linear: Any = head.eh_proj
        self.hooks.append(self.linear.register_forward_pre_hook(self._see_input))

    def see_last_input(self, hidden_SBH: torch.Tensor) -> None:
        self.target_SBH = hidden_SBH

    def _see_input(self, projection: nn.Module, args: tuple) -> None:
        if self.target_SBH is not None:
            is_token_SB = self._is_token()
            self._add(self._whole(args[0])[is_token_SB].double(), self._targets(is_token_SB))

    def finish(self) -> None:
        """Set the weight; collective over data-parallel ranks."""
        self._set(self.linear, self._solve())

    def _set(self, linear: Any, weight_HI: torch.Tensor) -> None:
        """Set this rank's rows of a column-parallel layer."""
        tp = self.mesh.tp
        linear.weight.copy_(weight_HI.chunk(tp.size())[tp.rank()])


class _FeatureProjectionFit(_ProjectionFit):
    """Fits the parts of a `FeatureProjection`, whose inputs are [embedding; state; features]."""

    def finish(self) -> None:
        """Set the weights; collective over data-parallel ranks."""
        size = self.chunk.config.hidden_size
        of_embedding, of_states = self._solve().tensor_split([size], dim=1)
        self._set(self.linear.embedding, of_embedding)
        self._set(self.linear.first, of_states)
        state, embedding = slice(size, 2 * size), slice(size)
        rest = self.products[state] - self.squares[state, embedding] @ of_embedding.T
        self._set(self.linear.later, torch.linalg.solve(self.squares[state, state], rest).T)


class _MlpFit(_Fit):
    """Fits `linear_fc2` of the head's MLP to the trunk's states before the final norm."""

    part = "MLP"
    input_SBF: torch.Tensor

    def __init__(self, chunk: GPTModel, depth: int, mesh: Mesh, block: Layer):
        head: Any = chunk.mtp.layers[depth]
        self.linear: Any = getattr(head, MTP_INNER_LAYER).mlp.linear_fc2
        super().__init__(chunk, depth, mesh, self.linear.weight.size(1) * mesh.tp.size())
        self.residual_multiplier = block.residual_multiplier
        final_norm: Any = chunk.decoder.final_layernorm  # in the model even if the decoder layers are not
        self.hooks = [
            final_norm.register_forward_pre_hook(self._see_target),
            self.linear.register_forward_pre_hook(self._see_input),
            head.final_layernorm.register_forward_pre_hook(self._see_output),
        ]

    def _see_target(self, norm: nn.Module, args: tuple) -> None:
        self.target_SBH = args[0]

    def _see_input(self, linear: nn.Module, args: tuple) -> None:
        self.input_SBF = args[0]  # positions of all sequence-parallel ranks, channels of this tensor-parallel rank

    def _see_output(self, norm: nn.Module, args: tuple) -> None:
        if self.target_SBH is None:
            return
        is_token_SB = self._is_token()
        target_NH = self._targets(is_token_SB)
        missing_NH = target_NH - self._whole(args[0])[is_token_SB]
        input_SBF = gather_from_tensor_model_parallel_region(self.input_SBF, group=self.mesh.tp)
        input_NF = self._gathered(input_SBF)[is_token_SB].double()
        root_mean_square_N1 = (target_NH.square().mean(1, keepdim=True) + self.chunk.config.layernorm_epsilon).sqrt()
        self._add(input_NF / root_mean_square_N1, missing_NH / root_mean_square_N1)

    def finish(self) -> None:
        """Add the solution to the weight; collective over data-parallel ranks."""
        change, tp = self._solve() / self.residual_multiplier, self.mesh.tp
        self.linear.weight.add_(change.chunk(tp.size(), dim=1)[tp.rank()])
