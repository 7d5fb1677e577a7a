"""Define the output layer as a value, for losses and drafts that compute logits from parts of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

from swiftlite.model.loss.chunked_loss import capped
from swiftlite.model.loss.clusters import TokenClusters
from swiftlite.model.loss.losses import MAX_POSITIONS, Group, vocab_parallel_argmax


@dataclass(frozen=True)
class OutputMatrix:
    """The output layer, or its rows for a draft vocabulary.

    Attributes:
        product: computes logits [N, V] without the cap from states [N, H].
        weight_VH: the matrix.
        tokens_V: the token of each row; None if the rows are this rank's part of the whole vocabulary.
        cap: as for `capped`.
        frozen_VH: columns of the matrix before those of `weight_VH`, which get no gradient; None without any.
        clusters: clusters of tokens, of which each state selects some; None: all tokens can be drafted.
    """

    product: Callable[[torch.Tensor], torch.Tensor]
    weight_VH: torch.Tensor
    tokens_V: torch.Tensor | None
    cap: float | None
    frozen_VH: torch.Tensor | None = None
    clusters: TokenClusters | None = None

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] of states [N, H], also of tokens outside of the selected clusters."""
        return capped(self.product(hidden_NH), self.cap)

    @torch.no_grad()
    def shown(self, logits_NV: torch.Tensor, hidden_NH: torch.Tensor, group: Group) -> torch.Tensor:
        """Return the logits [N, V] from which drafts are chosen: all others are below those of selected clusters."""
        if self.clusters is None:
            return logits_NV
        return self.clusters.masked(logits_NV, hidden_NH, group)

    @torch.no_grad()
    def most_likely(self, hidden_NH: torch.Tensor, group: Group) -> torch.Tensor:
        """Return the most likely tokens [N] after states [N, H]. Logits are computed for MAX_POSITIONS at a time.

        Args:
            group: the ranks that share the vocabulary.
        """
        token_N = torch.empty(len(hidden_NH), dtype=torch.int64, device=hidden_NH.device)
        for start in range(0, len(hidden_NH), MAX_POSITIONS):
            some = slice(start, start + MAX_POSITIONS)
            shown_NV = self.shown(self.logits(hidden_NH[some]), hidden_NH[some], group)
            token_N[some] = vocab_parallel_argmax(shown_NV, group, self.tokens_V)
        return token_N

    def detached(self, group: Any) -> "OutputMatrix":
        """Return the same layer with a matrix that gets no gradient.

        Args:
            group: tensor-parallel group that the vocabulary is split over.
        """
        weight_VH = self.weight_VH.detach()

        def logits(hidden_NH: torch.Tensor) -> torch.Tensor:
            # The matrix is split by rows, so the gradient of the states must be summed over its ranks.
            return F.linear(copy_to_tensor_model_parallel_region(hidden_NH, group), weight_VH)

        return replace(self, product=logits, weight_VH=weight_VH)

    def with_columns(self, weight_Vr: torch.Tensor, group: Any) -> "OutputMatrix":
        """Return the same layer, frozen, for states with r further numbers, and columns for them that are trained.

        Args:
            group: as for `detached`.
        """
        frozen, width = self.detached(group), self.weight_VH.size(1)

        def logits(hidden_NH: torch.Tensor) -> torch.Tensor:
            added_Nr = copy_to_tensor_model_parallel_region(hidden_NH[:, width:], group)
            return frozen.product(hidden_NH[:, :width]) + F.linear(added_Nr, weight_Vr)

        return replace(self, product=logits, weight_VH=weight_Vr, frozen_VH=frozen.weight_VH)
