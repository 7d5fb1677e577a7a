"""The output layers of trunk and heads: logits, and the matrices from which losses and drafts compute them.

Shapes: S sequence, B batch, H hidden size, V vocabulary on this tensor-parallel rank, N positions.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

from swiftlite.model.layers.tensor_parallel import ColumnParallelLinear
from swiftlite.model.loss.chunked_loss import capped
from swiftlite.model.loss.losses import sharing
from swiftlite.model.loss.output_matrix import OutputMatrix

if TYPE_CHECKING:
    from swiftlite.model.gpt import GPTModel


class OutputLayers:
    """The output layers that a model applies on its last pipeline stage.

    A head uses the output layer of the trunk, or its rows of the draft vocabulary, or has an output layer of its own.
    """

    def __init__(self, model: "GPTModel"):
        self._model = model

    def whole_logits(self, hidden_SBH: torch.Tensor, depth: int | None = None) -> torch.Tensor:
        """Return logits [B, S, V] for all positions of the row.

        Args:
            depth: number (from 0) of the draft whose states these are; None: those of the trunk.
        """
        model = self._model
        own = self.own(depth)
        hidden_SBH = model.whole_sequence(hidden_SBH)
        logits_BSV = self._logits(hidden_SBH, own).transpose(0, 1)
        if model.logits_divisor != 1:
            logits_BSV = logits_BSV / model.logits_divisor
        # The cap is the trunk's: an output layer that the drafter's kind has itself (`has_output_layer`) has none.
        if own is None or not model.heads.has_output_layer:
            return capped(logits_BSV, model.logits_cap)
        clusters = getattr(self._head(depth), "clusters", None)
        if clusters is None:
            return logits_BSV
        states_NH = hidden_SBH.transpose(0, 1).flatten(0, 1)
        return clusters.masked(logits_BSV.flatten(0, 1), states_NH, sharing(model.pg_collection.tp)).view_as(logits_BSV)

    def of_trunk(self) -> OutputMatrix:
        """Return the output layer over the whole vocabulary."""
        model = self._model
        weight: Any = model.output_layer.weight
        if model.share_embeddings_and_output_weights:
            weight = model.shared_embedding_or_output_weight()
        return OutputMatrix(lambda hidden_NH: self._logits(hidden_NH[:, None]).squeeze(1), weight, None, self._cap)

    def of_head(self, depth: int) -> OutputMatrix:
        """Return the output layer of the head that drafts token number `depth` (from 0), with its Markov head.

        If there is a draft vocabulary, it has only the rows of the draft vocabulary.
        """
        model, own = self._model, self.own(depth)
        if own is not None:
            weight: Any = own.weight
            cap = None if model.heads.has_output_layer else self._cap
            return OutputMatrix(
                lambda hidden_NH: self._logits(hidden_NH[:, None], own).squeeze(1),
                weight,
                None,
                cap,
                clusters=getattr(self._head(depth), "clusters", None),
            )
        shared = self.drafted()
        if self._markov is None:
            return shared
        weight_Vr: Any = self._markov.weight
        if model.heads.draft_vocab:
            weight_Vr = weight_Vr[model.drafted_rows]
        return shared.with_columns(weight_Vr, model.pg_collection.tp)

    def drafted(self) -> OutputMatrix:
        """Return the trunk's output layer as heads use it: detached if they are, and only its rows of the draft
        vocabulary.
        """
        model = self._model
        group: Any = model.pg_collection.tp
        whole = self.of_trunk()
        if model.detached_heads:
            whole = whole.detached(group)
        if not model.heads.draft_vocab:
            return whole
        rows_V = model.drafted_rows
        assert isinstance(rows_V, torch.Tensor)
        # No gradient: a draft vocabulary requires a frozen trunk (`rules/training/sft_heads.py`).
        weight_VH = whole.weight_VH.detach()[rows_V]

        def logits(hidden_NH: torch.Tensor) -> torch.Tensor:
            return F.linear(copy_to_tensor_model_parallel_region(hidden_NH, group), weight_VH)

        return OutputMatrix(logits, weight_VH, rows_V + group.rank() * len(whole.weight_VH), self._cap)

    def _logits(self, hidden_SBH: torch.Tensor, own: ColumnParallelLinear | None = None) -> torch.Tensor:
        """Return logits [S, B, V] for this rank's part of the vocabulary, without divisor and cap.

        Args:
            hidden_SBH: states of the trunk or of a drafter, also those with a Markov head (`DrafterLayer.draft`).
            own: output layer of a head; None for that of the trunk.
        """
        if own is not None:
            return own(hidden_SBH)[0]
        model, markov = self._model, self._markov
        width = model.config.hidden_size
        # The trunk's states pass here as well, and do not have the further numbers.
        if markov is not None and hidden_SBH.size(-1) > width:
            return self._logits(hidden_SBH[..., :width]) + markov(hidden_SBH[..., width:])[0]
        weight = None
        if model.share_embeddings_and_output_weights:
            weight = model.shared_embedding_or_output_weight()
        return model.output_layer(hidden_SBH, weight=weight)[0]

    @property
    def _cap(self) -> float | None:
        """Cap of the logits of states that are scaled for the temperature."""
        model = self._model
        # tanh(logits / cap) * cap, divided by the temperature t, is tanh(x / (cap / t)) * cap / t of x = logits / t.
        return None if model.logits_cap is None else model.logits_cap / model.temperature

    def own(self, depth: int | None) -> ColumnParallelLinear | None:
        """Return the own output layer of the head that drafts token number `depth` (from 0); None without one."""
        return getattr(self._head(depth), "output_layer", None)

    def _head(self, depth: int | None) -> Any:
        """Return the layer that drafts token number `depth`; None for the trunk, and on stages without the heads."""
        model = self._model
        if depth is None or not model.mtp_process:
            return None
        # An unrolled layer drafts `unroll` tokens: with 3, drafts 0, 1 and 2 are those of layer 0.
        return model.mtp.layers[depth // model.heads.unroll]

    @property
    def _markov(self) -> ColumnParallelLinear | None:
        """The output matrix of the drafter's Markov head; None without one."""
        return getattr(self._head(0), "markov_output", None)
