"""GPTModel in four stages, each a method that can be called alone: preprocess, decoder, MTP, postprocess.

On a pipeline, each rank runs the stages it holds, and what crosses from one rank to the next is one tensor [S, B, H];
behind the MTP layers, when the loss is on a later rank, the states of trunk and heads stand one after the other in it.

Shapes: S sequence (of this context- and sequence-parallel rank), B batch, H hidden size, V vocabulary on this
tensor-parallel rank, D MTP depth.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel as McoreGPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.args.fields import MtpLoss
from swiftlite.data.batch import ahead
from swiftlite.families.drafting import Drafting
from swiftlite.heads import Heads
from swiftlite.model.context_parallel import (
    gather_sequence,
    padded_cu_seqlens,
    sequence_lengths,
    zigzag_positions,
)
from swiftlite.model.loss import IGNORE_INDEX, TokenLoss, distillation_loss, token_loss
from swiftlite.model.mtp import UnrolledLayer
from swiftlite.model.recompute import TransformerBlock
from swiftlite.model.rope import RotaryEmbedding


@dataclass(frozen=True)
class Logits:
    """Logits of the trunk and of each MTP depth, [B, S, V]."""

    main: torch.Tensor
    mtp: list[torch.Tensor]


@dataclass(frozen=True)
class Losses:
    """Per-token losses of the trunk and of each MTP depth."""

    main: TokenLoss
    mtp: list[TokenLoss]


class GPTModel(McoreGPTModel):
    """megatron-core's GPTModel with its forward pass rewritten as four stages.

    The stock forward needs labels as soon as there are MTP layers, weighs the MTP loss by local token counts, and hides
    it from the caller (gpt_model.py:611-661 of 0.16.1). Here each stage returns what it made.

    Args:
        hf_config: the model's config.json, for the rotary frequencies.
        heads: the MTP heads.
        heads_only: run embedding, decoder and the trunk's loss without gradient; only MTP layers learn.
        drafting: what MTP layers are fed.
        mtp_loss: what the heads learn: the data's tokens by cross-entropy (ce), or the trunk's own distribution of
            them, from which no gradient flows back (kl, tv: `distillation_loss`).
        kwargs: of megatron-core's GPTModel.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        hf_config: dict[str, Any],
        heads: Heads = Heads(),
        heads_only: bool = False,
        drafting: Drafting = Drafting(),
        mtp_loss: MtpLoss = "ce",
        **kwargs: Any,
    ):
        # Made first: it notes in the config what the attention of megatron-core 0.19 reads in its constructor.
        rotary_pos_emb = None if config.multi_latent_attention else RotaryEmbedding(hf_config, config)
        super().__init__(config=config, **kwargs)
        self.decoder.__class__ = TransformerBlock  # ours only adds a method, and the stock constructor names its own
        if rotary_pos_emb is not None:  # latent attention has one of its own in each layer
            self.rotary_pos_emb = rotary_pos_emb
        self.heads, self.heads_only, self.drafting = heads, heads_only, drafting
        self.mtp_loss: MtpLoss = mtp_loss
        if heads_only:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.startswith("mtp."))
        if self.post_process:
            # Made for the whole sequence and not only this rank's part: `_loss` gathers it before it picks positions.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = self.config.tensor_model_parallel_size > 1
            if self.mtp_process and self.share_embeddings_and_output_weights and not self.pre_process:
                # The MTP layers' embedding on this stage is the tied head as well; megatron-core allocates a second
                # one that nothing uses, and then refuses to save it (language_module.py:341 of 0.16.1).
                self.output_layer.weight = None

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        mtp_input_ids: Sequence[torch.Tensor] | torch.Tensor | None = None,
        mtp_labels: Sequence[torch.Tensor] | torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Logits | Losses | torch.Tensor:
        """The stages that this rank holds; on a model that is not split, all four.

        Args:
            input_ids: [B, S].
            position_ids: [B, S].
            attention_mask: None is causal; rows are padded at the end, so nothing else is needed.
            labels: [B, S], labels[b, s] the token at s + 1, IGNORE_INDEX where nothing is to be learned.
            mtp_input_ids: [B, S] for each depth k, the token at s + k. Unset: `input_ids` shifted inside each sequence,
                which is right unless context-parallel ranks share the row.
            mtp_labels: [B, S] for each depth k, the token at s + k + 1; unset as above.
            packed_seq_params: of a packed row, B = 1: its sequences, none of which sees another.

        Returns:
            On the last pipeline stage Losses with labels, Logits without; elsewhere what the next stage takes.
        """
        num_drafts = self.heads.drafts
        cu_seqlens = None if packed_seq_params is None else padded_cu_seqlens(packed_seq_params)
        if mtp_input_ids is None:
            mtp_input_ids = ahead(input_ids, num_drafts, 0, cu_seqlens)[1:]
        head_labels = None
        if labels is not None:
            if mtp_labels is None:
                mtp_labels = ahead(labels, num_drafts, IGNORE_INDEX, cu_seqlens)[1:]
            head_labels = [labels, *mtp_labels]
        # Behind the MTP stage there is no trunk left, only states that pass through to the loss.
        is_behind_mtp = bool(num_drafts) and self.post_process and not self.mtp_process
        is_frozen = self.heads_only and not is_behind_mtp
        takes_before_norm = self.mtp_process and self.drafting.takes_before_norm
        before_SBH: torch.Tensor | None = None  # the trunk's states before its final norm
        if takes_before_norm and self.decoder.final_layernorm is None:
            received: Any = self.decoder.input_tensor  # the stage before had the norm, and sent both
            before_SBH, after_SBH = received.chunk(2)
            self.decoder.set_input_tensor(after_SBH)
        with torch.no_grad() if is_frozen else nullcontext():
            hidden_SBH, rotary_pos_emb = self.forward_preprocess(input_ids, position_ids, packed_seq_params)
            hidden_SBH = self.forward_decoder(hidden_SBH, rotary_pos_emb, attention_mask, packed_seq_params)
        if is_frozen and not self.pre_process:
            hidden_SBH = _NoGradient.apply(hidden_SBH, self.decoder.input_tensor)
            if before_SBH is not None:
                before_SBH = _NoGradient.apply(before_SBH, self.decoder.input_tensor)
        if takes_before_norm and before_SBH is None:
            before_SBH, hidden_SBH = hidden_SBH.chunk(2)
        states_SBH = [hidden_SBH]
        if self.mtp_process:
            taken_SBH = hidden_SBH if before_SBH is None else before_SBH
            states_SBH += self.forward_mtp(
                taken_SBH, list(mtp_input_ids), position_ids, rotary_pos_emb, attention_mask, packed_seq_params
            )
        elif is_behind_mtp:
            states_SBH = list(hidden_SBH.chunk(1 + num_drafts))
        if not self.post_process:
            return torch.cat(states_SBH)
        return self.forward_postprocess(states_SBH, head_labels, cu_seqlens)

    def forward_preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, packed_seq_params: PackedSeqParams | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Embeddings [S, B, H], on the first pipeline stage, and rotary angles: [S, 1, 1, D], or of a packed row
        `RotaryEmbedding.packed`.

        With latent attention there are no angles here: its layers make their own.
        """
        hidden_SBH, rotary_pos_emb, *_ = self._preprocess(
            input_ids=input_ids,
            position_ids=position_ids,
            packed_seq_params=packed_seq_params,  # pyright: ignore[reportArgumentType]: None upstream too
        )
        if packed_seq_params is not None and rotary_pos_emb is not None:
            rotary_pos_emb = self.rotary_pos_emb.packed(padded_cu_seqlens(packed_seq_params))
        return hidden_SBH, rotary_pos_emb

    def forward_decoder(
        self,
        hidden_SBH: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """The trunk's states [S, B, H] after this stage's layers; after the last layer, also after the final norm, or
        those before and after it [2S, B, H] if MTP layers take the former.

        Args:
            hidden_SBH: embeddings; on later pipeline stages None, they take what `set_input_tensor` was given.
        """
        return self.decoder(
            hidden_states=hidden_SBH,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
        )

    def forward_mtp(
        self,
        hidden_SBH: torch.Tensor,
        mtp_input_ids: Sequence[torch.Tensor],
        position_ids: torch.Tensor,
        rotary_pos_emb: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> list[torch.Tensor]:
        """States [S, B, H] of each MTP depth, after its output norm; depth k feeds depth k + 1.

        Args:
            hidden_SBH: the trunk's, as `Drafting` says.
        """
        if self.heads.unroll > 1:
            (layer,) = self.mtp.layers
            assert isinstance(layer, UnrolledLayer)
            first, *later = mtp_input_ids  # from position 0, step j stands at position j - 1
            embeddings = [self._embed_for_head(first, position_ids)]
            embeddings += [self.embedding(input_ids=ids, position_ids=position_ids) for ids in later]
            return layer.forward_steps(
                hidden_SBH,
                embeddings,
                [self._angles(position_ids, packed_seq_params, step) for step in range(self.heads.unroll)],
                packed_seq_params,
                recycles_before_norm=self.drafting.recycles_before_norm,
            )
        states = []
        for layer, input_ids in zip(self.mtp.layers, mtp_input_ids, strict=True):
            hidden_SBH, *_ = layer(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden_SBH,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                embedding=self._embed_for_head,
            )
            states.append(hidden_SBH)
        return states

    def _embed_for_head(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [S, B, H] as a head is given them: of nothing, at the position where its engine gives it none."""
        embeddings_SBH = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if not self.drafting.zeroes_first_embedding:
            return embeddings_SBH
        is_first_SB1 = (position_ids == 0).T[..., None]
        if self.config.sequence_parallel:
            rank, size = parallel_state.get_tensor_model_parallel_rank(), self.config.tensor_model_parallel_size
            is_first_SB1 = is_first_SB1.chunk(size)[rank]
        return embeddings_SBH.masked_fill(is_first_SB1, 0)

    def _angles(
        self, position_ids: torch.Tensor, packed_seq_params: PackedSeqParams | None, offset: int
    ) -> torch.Tensor | None:
        """Rotary angles as `forward_preprocess` gives them, for rows that begin at position `offset`."""
        if self.config.multi_latent_attention:
            return None
        if packed_seq_params is not None:
            return self.rotary_pos_emb.packed(padded_cu_seqlens(packed_seq_params), offset)
        return self.rotary_pos_emb(position_ids.size(1) * self.config.context_parallel_size, offset=offset)

    def forward_postprocess(
        self,
        states_SBH: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor] | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> Logits | Losses:
        """The output layer over the trunk's and the heads' states: losses with labels, else logits.

        Args:
            states_SBH: the trunk's, then each depth's.
            labels: [B, S] for the trunk, then for each depth.
            cu_seqlens: of a packed row: where its padded sequences start, in the whole row.
        """
        if labels is None:
            main, *mtp = (self.logits(self._whole(hidden)).transpose(0, 1) for hidden in states_SBH)
            return Logits(main, mtp)
        with torch.no_grad() if self.heads_only else nullcontext():
            main = self._loss(states_SBH[0], labels[0])
        if self.mtp_loss == "ce":
            return Losses(main, [self._loss(*head) for head in zip(states_SBH[1:], labels[1:], strict=True)])
        group: Any = parallel_state.get_context_parallel_group()
        lengths = sequence_lengths(labels[0].size(1) * group.size(), cu_seqlens)
        positions_S = zigzag_positions(lengths, group.rank(), group.size(), labels[0].device)
        trunk_SBH = self._whole(states_SBH[0].detach())
        if group.size() > 1:
            trunk_SBH = gather_sequence(trunk_SBH, lengths, group)
        mtp = []
        for depth, (hidden, head_labels) in enumerate(zip(states_SBH[1:], labels[1:], strict=True), start=1):
            row_N, place_N = (head_labels != IGNORE_INDEX).nonzero(as_tuple=True)
            # Where the trunk predicts the same token; a label says that it is in the same sequence.
            mtp.append(self._loss(hidden, head_labels, trunk_SBH[positions_S[place_N] + depth, row_N]))
        return Losses(main, mtp)

    def logits(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """[S, B, V] for this rank's part of the vocabulary."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_SBH, weight=weight)[0]

    def _loss(
        self, hidden_SBH: torch.Tensor, labels_BS: torch.Tensor, trunk_NH: torch.Tensor | None = None
    ) -> TokenLoss:
        """Cross-entropy; with the trunk's states for the same targets, the distance to what it predicts of them."""
        # Only positions that have a target meet the vocabulary: prompts and padding are often half of a batch.
        picked_BS = labels_BS != IGNORE_INDEX
        hidden_NH = self._whole(hidden_SBH).transpose(0, 1)[picked_BS]
        logits_NV = self.logits(hidden_NH[:, None])[:, 0]
        if trunk_NH is None:
            return token_loss(logits_NV, labels_BS[picked_BS], picked_BS)
        assert self.mtp_loss != "ce"
        return distillation_loss(
            logits_NV, lambda rows: self.logits(trunk_NH[rows][:, None])[:, 0], self.mtp_loss, picked_BS
        )

    def _whole(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """All positions of the row, gathered over sequence-parallel ranks."""
        if not self.config.sequence_parallel:
            return hidden_SBH
        # Each rank's gradient is whole already: the output layer sums it over the ranks, so backward only cuts it.
        return gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=False)


class _NoGradient(torch.autograd.Function):
    """Passes a frozen stage's output on; its input gets a gradient of zeros.

    megatron-core's pipeline waits for a gradient from every later stage, and a frozen one would send none.
    """

    @staticmethod
    def forward(ctx, output: torch.Tensor, stage_input: torch.Tensor) -> torch.Tensor:
        ctx.stage_input = stage_input.shape, stage_input.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        shape, dtype = ctx.stage_input
        return None, gradients[0].new_zeros(shape, dtype=dtype)
