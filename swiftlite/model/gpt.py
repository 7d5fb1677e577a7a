"""GPTModel in four stages, each a method that can be called alone: preprocess, decoder, MTP, postprocess.

Shapes: S sequence, B batch, H hidden size, V vocabulary on this tensor-parallel rank.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel as McoreGPTModel

from swiftlite.model.loss import IGNORE_INDEX, TokenLoss, token_loss
from swiftlite.model.mtp import shift_left
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
        heads_only: run embedding, decoder and the trunk's loss without gradient; only MTP layers learn.
        kwargs: of megatron-core's GPTModel.
    """

    def __init__(self, *, hf_config: dict[str, Any], heads_only: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        if not self.config.multi_latent_attention:  # which has a rotary embedding of its own in each layer
            self.rotary_pos_emb = RotaryEmbedding(hf_config, self.config)
        self.heads_only = heads_only
        if heads_only:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.startswith("mtp."))

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Logits | Losses:
        """All four stages.

        Args:
            input_ids: [B, S].
            position_ids: [B, S].
            attention_mask: None is causal; rows are padded at the end, so nothing else is needed.
            labels: [B, S], labels[b, s] the token at s + 1, IGNORE_INDEX where nothing is to be learned.

        Returns:
            Losses with labels, Logits without.
        """
        with torch.no_grad() if self.heads_only else nullcontext():
            hidden_SBH, rotary_pos_emb = self.forward_preprocess(input_ids, position_ids)
            hidden_SBH = self.forward_decoder(hidden_SBH, rotary_pos_emb, attention_mask)
        mtp_SBH = self.forward_mtp(hidden_SBH, input_ids, position_ids, rotary_pos_emb, attention_mask)
        return self.forward_postprocess(hidden_SBH, mtp_SBH, labels)

    def forward_preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embeddings [S, B, H] and rotary angles [S, 1, 1, D]; no angles with multi-latent attention."""
        hidden_SBH, rotary_pos_emb, *_ = self._preprocess(input_ids=input_ids, position_ids=position_ids)
        return hidden_SBH, rotary_pos_emb

    def forward_decoder(
        self, hidden_SBH: torch.Tensor, rotary_pos_emb: torch.Tensor | None, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The trunk's states [S, B, H], after its final norm."""
        return self.decoder(hidden_states=hidden_SBH, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb)

    def forward_mtp(
        self,
        hidden_SBH: torch.Tensor,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        rotary_pos_emb: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """States [S, B, H] of each MTP depth, after its output norm; depth k feeds depth k + 1. Empty at depth 0."""
        states = []
        for layer in self.mtp.layers if self.mtp_process else ():
            hidden_SBH, input_ids, position_ids = layer(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden_SBH,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                embedding=self.embedding,
            )
            states.append(hidden_SBH)
        return states

    def forward_postprocess(
        self, hidden_SBH: torch.Tensor, mtp_SBH: list[torch.Tensor], labels: torch.Tensor | None = None
    ) -> Logits | Losses:
        """The output layer over the trunk's and the heads' states: losses with labels, else logits."""
        if labels is None:
            return Logits(*self._split(self.logits(hidden).transpose(0, 1) for hidden in (hidden_SBH, *mtp_SBH)))
        losses = []
        for depth, hidden in enumerate((hidden_SBH, *mtp_SBH)):
            if depth > 0:
                labels = shift_left(labels, fill=IGNORE_INDEX)
            with torch.no_grad() if self.heads_only and depth == 0 else nullcontext():
                losses.append(self._loss(hidden, labels))
        return Losses(*self._split(losses))

    def logits(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """[S, B, V] for this rank's part of the vocabulary."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_SBH, weight=weight)[0]

    def _loss(self, hidden_SBH: torch.Tensor, labels_BS: torch.Tensor) -> TokenLoss:
        # Only positions that have a target meet the vocabulary: prompts and padding are often half of a batch.
        picked_BS = labels_BS != IGNORE_INDEX
        hidden_NH = hidden_SBH.transpose(0, 1)[picked_BS]
        return token_loss(self.logits(hidden_NH[:, None])[:, 0], labels_BS[picked_BS], picked_BS)

    @staticmethod
    def _split(heads):
        main, *mtp = heads
        return main, mtp
