"""Fit the projection of new heads to the inputs of the last decoder layer (`--mtp_init fit_last_layer`).

The decoder layer of a new head is a copy of the trunk's last decoder layer, so it needs inputs similar to the inputs of
that layer. Its input is the output of the projection `eh_proj`, which maps the embedding of a token and the state at
the previous position to one hidden state. The projection is fitted so that this hidden state is close to the last
layer's input at that token. Let a[s] be the input of the projection of depth k = 1, 2, ... at position s, and x[s] the
input of the last decoder layer. Over N tokens of training rows:

    eh_proj = argmin over W of  sum over s of |W a[s] - x[s + k]|^2  +  RIDGE * N * |W|^2

The effect was measured on SmolLM2-135M-Instruct with answers that it generated. Before the first step, the head
predicts the trunk's token at 38 % of the held-out positions; with `--mtp_init copy_last_layer` or `random`, at less
than 0.2 %.

Shapes: S sequence, B batch, H hidden size, N tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from swiftlite.data.batch import Batch
from swiftlite.data.changed_samples import lengths_of
from swiftlite.data.sample import Sample
from swiftlite.log import logger
from swiftlite.model.context_parallel import gather_sequence, sequence_lengths
from swiftlite.model.forward import forward
from swiftlite.model.gpt import GPTModel
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.model.ranks import all_gather_rows
from swiftlite.model.streamed_trunk import StreamedTrunk
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import on_this_rank, run_batches

TOKENS_PER_INPUT = 50
"""Number of tokens for the fit per input channel of the projection. The projection has 2H input channels, so a hidden
size of 576 requires about 60,000 tokens."""
RIDGE = 0.01
"""Regularization of the fit. It is small compared to the inputs, which are outputs of norms and have a mean square of
about 1."""


def samples_to_fit(samples: Sequence[Sample], hidden_size: int) -> list[Sample]:
    """Return enough samples for the fit, spread evenly over all files; all samples if there are not enough."""
    lengths, starts = lengths_of(samples)
    num_tokens = int(lengths[starts].sum())
    stride = max(num_tokens // (2 * hidden_size * TOKENS_PER_INPUT), 1)
    return [samples[index] for index in range(0, len(samples), stride)]


@torch.no_grad()
def fit_heads(
    chunks: Sequence[GPTModel], mesh: Mesh, batches: Sequence[Batch], streamed_trunk: StreamedTrunk | None = None
) -> None:
    """Fit the projection of each head, in order of depth, because each head reads the output of the previous one.
    Collective.

    Args:
        chunks: the stages of the model on this rank. The last decoder layer and all heads must be on one stage;
            `why_no_fit` rejects other layouts.
        batches: this rank's micro-batches, the same number on every data-parallel rank.
        streamed_trunk: computes the trunk if the chunks have no decoder layers.
    """
    for chunk in chunks:
        chunk.eval()  # disables recomputation
    for depth in range(chunks[0].config.mtp_num_layers or 0):
        fits = [_Fit(chunk, depth, mesh) for chunk in chunks if chunk.mtp_process]
        with mesh.active():
            if streamed_trunk:
                _run_streamed(streamed_trunk, chunks[0], mesh, batches, fits)
            else:
                _run(chunks, mesh, batches, fits)
        for fit in fits:
            fit.finish()
    for chunk in chunks:
        chunk.train()


def _run(chunks: Sequence[GPTModel], mesh: Mesh, batches: Sequence[Batch], fits: Sequence["_Fit"]) -> None:
    """Run all micro-batches through the model while `fits` collect inputs."""

    def forward_step(batches: Iterator[Batch], chunk: nn.Module) -> tuple[Any, Callable]:
        batch = next(batches)
        for fit in fits:
            fit.batch = batch
        output = forward(chunk, _without_labels(batch))
        return output, lambda losses: (torch.zeros(()), torch.zeros((), dtype=torch.int32), None)

    run_batches(chunks, mesh, batches, forward_step, forward_only=True)


def _run_streamed(
    trunk: StreamedTrunk, model: GPTModel, mesh: Mesh, batches: Sequence[Batch], fits: Sequence["_Fit"]
) -> None:
    """Run all micro-batches like `_run`, through a model whose trunk is streamed."""
    unlabeled = map(_without_labels, on_this_rank(batches, mesh))
    for streamed in trunk.outputs(unlabeled, with_last_input=True):
        assert streamed.last_input_SBH is not None
        for fit in fits:
            fit.see(streamed.batch, streamed.last_input_SBH)
        forward(model, streamed.batch, trunk=streamed.output)


def _without_labels(batch: Batch) -> Batch:
    """Return the batch without labels, so that no logits are computed."""
    return replace(batch, labels_KBS=torch.full_like(batch.labels_KBS, IGNORE_INDEX))


class _Fit:
    """Collects the sums for the fit from the inputs of the last decoder layer and of one projection.

    Attributes:
        batch: the micro-batch that the stage currently computes.
    """

    batch: Batch

    def __init__(self, chunk: GPTModel, depth: int, mesh: Mesh):
        self.chunk = chunk
        self.depth = depth
        self.mesh = mesh
        head: Any = chunk.mtp.layers[depth]
        self.projection: Any = head.eh_proj
        size = chunk.config.hidden_size
        float64 = {"dtype": torch.float64, "device": mesh.device.torch_device}
        self.squares = torch.zeros(2 * size, 2 * size, **float64)
        self.products = torch.zeros(2 * size, size, **float64)
        self.num_tokens = torch.zeros((), **float64)
        self.target_SBH: torch.Tensor | None = None
        self.hooks = [self.projection.register_forward_pre_hook(self._see_input)]
        if not chunk.streams_trunk:
            last_layer: Any = chunk.decoder.layers[-1]
            self.hooks.append(last_layer.register_forward_pre_hook(self._see_target, with_kwargs=True))

    def see(self, batch: Batch, last_input_SBH: torch.Tensor) -> None:
        """Set the micro-batch, and the input that the trunk's last decoder layer received for it."""
        self.batch = batch
        self.target_SBH = self._whole(on_device(last_input_SBH, self.mesh.device.torch_device))

    def _see_target(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.target_SBH = self._whole(kwargs["hidden_states"])

    def _see_input(self, projection: nn.Module, args: tuple) -> None:
        if self.target_SBH is None:
            return  # with --mtp_unroll the projection runs once per draft step, and is fitted to the first step
        input_SBH = self._whole(args[0])
        sequence_SB = all_gather_rows(self.batch.sequence_KBS[self.depth + 1], self.mesh, self.batch.cu_seqlens).T
        is_token_SB = sequence_SB >= 0
        # Entry s of the target is the last layer's input at s + depth + 1 in the same sequence. Entries that `roll`
        # wraps around are masked, because the sequence has ended there.
        target_NH = self.target_SBH.roll(-self.depth - 1, dims=0)[is_token_SB].double()
        input_NH = input_SBH[is_token_SB].double()
        self.squares += input_NH.T @ input_NH
        self.products += input_NH.T @ target_NH
        self.num_tokens += len(input_NH)
        self.target_SBH = None

    def _whole(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Gather whole rows from each rank's part."""
        hidden_SBH = self.chunk.whole_sequence(hidden_SBH)
        cp = self.mesh.cp
        if cp.size() == 1:
            return hidden_SBH
        lengths = sequence_lengths(hidden_SBH.size(0) * cp.size(), self.batch.cu_seqlens)
        return gather_sequence(hidden_SBH, lengths, cp)

    def finish(self) -> None:
        """Solve for the projection's weight and set it; collective over data-parallel ranks."""
        for hook in self.hooks:
            hook.remove()
        for tensor in (self.squares, self.products, self.num_tokens):
            dist.all_reduce(tensor, group=self.mesh.dp)
        num_tokens = int(self.num_tokens)
        self.squares.diagonal().add_(RIDGE * num_tokens)
        weight = torch.linalg.solve(self.squares, self.products).T
        tp = self.mesh.tp
        self.projection.weight.copy_(weight.chunk(tp.size())[tp.rank()])
        logger.info("head %d: projection fitted to the last layer's input at %d tokens", self.depth + 1, num_tokens)
