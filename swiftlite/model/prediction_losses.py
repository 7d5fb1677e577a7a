"""The losses of the predictions of trunk and heads, from their states.

Shapes: S sequence, B batch, H hidden size, V vocabulary on this tensor-parallel rank, N positions with a label, T
positions of whole rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from swiftlite.model.context_parallel import gather_sequence, sequence_lengths, zigzag_positions
from swiftlite.model.inputs import Target
from swiftlite.model.loss.chunked_loss import EntropyTarget, LabelTarget, TeacherTarget, TrunkTarget, chunked_loss
from swiftlite.model.loss.clusters import with_clusters
from swiftlite.model.loss.losses import Selected, TokenLoss, distillation_loss, select, sharing, token_loss
from swiftlite.model.loss.output_matrix import OutputMatrix
from swiftlite.model.stage_states import StageStates

if TYPE_CHECKING:
    from swiftlite.model.gpt import GPTModel


class PredictionLosses:
    """The losses that a model computes on its last pipeline stage."""

    def __init__(self, model: "GPTModel"):
        self._model = model

    def cross_entropy(
        self,
        hidden_SBH: torch.Tensor,
        labels_BS: torch.Tensor,
        output: OutputMatrix | None = None,
        *,
        share_BS: torch.Tensor | None = None,
        with_entropy: bool = False,
        trains_entropy: bool = False,
    ) -> TokenLoss:
        """Return the cross-entropy with the labels.

        Args:
            output: output layer; default: that of the trunk.
            share_BS: weight of each label in the loss, if it is known.
            with_entropy: whether to compute the entropy of each distribution as well.
            trains_entropy: whether to compute it with a gradient, which requires all logits a second time.
        """
        model = self._model
        selected = select(labels_BS, hidden_SBH.device)
        states_NH = self._scaled(self._at_labels(hidden_SBH, selected))
        output = output or model.output_layers.of_trunk()
        if trains_entropy:
            # A second pass over the chunks: the first one overwrites the logits with the gradient of the cross-entropy.
            plain = self.cross_entropy(hidden_SBH, labels_BS, output, share_BS=share_BS)
            return replace(plain, entropy_BS=self._chunked(states_NH, output, EntropyTarget(), selected, None).loss_BS)
        if model.loss_in_chunks:
            entropy_N = torch.empty_like(selected.label_N, dtype=torch.float32) if with_entropy else None
            target = LabelTarget(selected.label_N, entropy_N)
            loss = self._chunked(states_NH, output, target, selected, share_BS)
        else:
            tp, logits_NV = model.pg_collection.tp, output.logits(states_NH)
            shown_NV = output.shown(logits_NV, states_NH, sharing(tp))
            loss = token_loss(logits_NV, selected, tp, shown_NV=shown_NV, with_entropy=with_entropy)
        return with_clusters(loss, output.clusters, states_NH, selected, share_BS)

    def divergence(self, hidden_SBH: torch.Tensor, target: Target) -> TokenLoss:
        """Return the divergence between the predictions of the trunk and a teacher at each position with a label."""
        model, teacher, weights = self._model, target.teacher, target.weights
        assert teacher is not None
        selected = select(target.labels, hidden_SBH.device)
        states_NH = self._scaled(self._at_labels(hidden_SBH, selected))
        output = model.output_layers.of_trunk()
        if model.loss_in_chunks:
            return self._chunked(states_NH, output, teacher, selected, weights[0] if weights else None)
        tp, logits_NV = model.pg_collection.tp, output.logits(states_NH)
        return distillation_loss(logits_NV, teacher.logits, teacher.distance, selected, tp, beta=teacher.weight)

    def distillation(
        self,
        states: StageStates,
        labels: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor | None],
        cu_seqlens: torch.Tensor | None,
    ) -> list[TokenLoss]:
        """Return the losses that compare each head's prediction with the trunk's prediction of the same token.

        At position s, depth k predicts the token s + k + 1, which the trunk predicts at position s + k. This position
        can be on another context-parallel rank: with a row of 8 tokens on 2 ranks, rank 0 holds positions 0 1 6 7, and
        depth 1 at position 1 learns the trunk's prediction at position 2. If there is a label, s + k is in the same
        sequence.
        """
        model = self._model
        # Detached: the trunk is the teacher. Its own loss is the next-token loss alone.
        trunk_TBH, position_S = self._whole_rows(states.trunk_SBH.detach(), cu_seqlens)
        losses = []
        heads = enumerate(zip(states.heads_SBH, labels, weights, strict=True), start=1)
        for depth, (hidden_SBH, labels_BS, share_BS) in heads:
            selected = select(labels_BS, hidden_SBH.device)
            # `pos_N` counts positions of this rank's part of the row, and `position_S` maps them to the whole row.
            trunk_NH = trunk_TBH[(position_S + depth)[selected.pos_N], selected.row_N]
            states_NH = self._at_labels(hidden_SBH, selected)
            output = model.output_layers.of_head(depth - 1)
            trunk_output = output
            # A head's own matrix does not predict like the trunk, whose distribution is the target.
            if model.output_layers.own(depth - 1) is not None:
                trunk_output = model.output_layers.of_trunk().detached(model.pg_collection.tp)
            # Without the columns of the Markov head, to which the trunk's states have no counterpart.
            elif output.frozen_VH is not None:
                trunk_output = model.output_layers.drafted()
            states_NH, trunk_NH = self._scaled(states_NH), self._scaled(trunk_NH)
            loss = self._distance(states_NH, trunk_NH, selected, output, trunk_output, share_BS)
            losses.append(with_clusters(loss, output.clusters, states_NH, selected, share_BS))
        return losses

    def label_states(self, hidden_SBH: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """Return the states [N, H] at positions with a label, scaled for divisor and temperature of logits."""
        return self._scaled(self._at_labels(hidden_SBH, select(labels_BS, hidden_SBH.device)))

    def _distance(
        self,
        states_NH: torch.Tensor,
        trunk_NH: torch.Tensor,
        selected: Selected,
        output: OutputMatrix,
        trunk_output: OutputMatrix,
        share_BS: torch.Tensor | None,
    ) -> TokenLoss:
        """Return the distance between the predictions of a head and the trunk at each selected position.

        Args:
            output, trunk_output: output layers of the head and of the trunk, with the same tokens.
            share_BS: weight of each position in the loss, if it is known.
        """
        model = self._model
        assert model.mtp_loss != "ce"
        with_overlap = model.heads.has_joint_weights
        if model.loss_in_chunks:
            overlap_N = torch.empty_like(selected.label_N, dtype=torch.float32) if with_overlap else None
            weight_VH = trunk_output.weight_VH.detach()
            target = TrunkTarget(trunk_NH, model.mtp_loss, weight_VH, trunk_output.cap, overlap_N)
            return self._chunked(states_NH, output, target, selected, share_BS)

        def trunk_logits(rows: slice) -> torch.Tensor:
            return trunk_output.logits(trunk_NH[rows])

        logits_NV, tp = output.logits(states_NH), model.pg_collection.tp
        return distillation_loss(
            logits_NV,
            trunk_logits,
            model.mtp_loss,
            selected,
            tp,
            output.tokens_V,
            shown_NV=output.shown(logits_NV, states_NH, sharing(tp)),
            with_overlap=with_overlap,
        )

    def _chunked(
        self,
        states_NH: torch.Tensor,
        output: OutputMatrix,
        target: LabelTarget | EntropyTarget | TrunkTarget | TeacherTarget,
        selected: Selected,
        share_BS: torch.Tensor | None,
    ) -> TokenLoss:
        return chunked_loss(
            states_NH,
            output.weight_VH,
            target,
            selected,
            self._model.pg_collection.tp,
            output.tokens_V,
            share_BS,
            frozen_VH=output.frozen_VH,
            cap=output.cap,
            clusters=output.clusters,
            returns_gradient=self._model.returns_matrix_gradient,
        )

    def _at_labels(self, hidden_SBH: torch.Tensor, selected: Selected) -> torch.Tensor:
        """Return the states [N, H] at positions with a label; other positions, often half of a row, need no logits."""
        hidden_SBH = self._model.whole_sequence(hidden_SBH)
        # One index into S * B states: with indices into [B, S], the gradient would have the layout [B, S], and every
        # layer would copy it.
        return hidden_SBH.flatten(0, 1)[selected.pos_N * hidden_SBH.size(1) + selected.row_N]

    def _scaled(self, states_NH: torch.Tensor) -> torch.Tensor:
        """Scale states so that their logits are divided by `logits_divisor` and the temperature. Output layers have no
        bias.
        """
        divisor = self._model.logits_divisor * self._model.temperature
        if divisor == 1:
            return states_NH
        return states_NH / divisor

    def _whole_rows(
        self, trunk_SBH: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the trunk's states of whole rows [T, B, H], and the positions [S] of this rank's part."""
        group: Any = self._model.pg_collection.cp
        trunk_SBH = self._model.whole_sequence(trunk_SBH)
        lengths = sequence_lengths(trunk_SBH.size(0) * group.size(), cu_seqlens)
        position_S = zigzag_positions(lengths, group.rank(), group.size(), trunk_SBH.device)
        if group.size() > 1:
            trunk_SBH = gather_sequence(trunk_SBH, lengths, group)
        return trunk_SBH, position_S
