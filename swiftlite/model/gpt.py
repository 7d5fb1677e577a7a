"""GPTModel in four stages, each a method that can be called alone: preprocess, decoder, MTP, postprocess.

On a pipeline, each rank runs the stages it holds, and what crosses from one rank to the next is one tensor [S, B, H].
Where more than one state has to cross, they stand one after the other in it:

    before the final norm      the trunk's state                                       S
    behind it, heads to come   the trunk's state; where heads take the one before
                               the norm, that and the one after it                     S or 2S
    behind the heads           the trunk's state after the norm, and each head's       (1 + D)S

For example, `Et*2|t*2|m|L` with one head that takes the state before the norm: ranks 0 to 2 send S, 2S and 2S; rank 3
computes the losses of both states that it received.

Shapes: S sequence (of this context- and sequence-parallel rank), B batch, H hidden size, V vocabulary on this
tensor-parallel rank, D MTP depth.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel as McoreGPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.args.fields import MtpLoss
from swiftlite.data.batch import ahead
from swiftlite.drafting import Drafting
from swiftlite.errors import UserError
from swiftlite.heads import Heads
from swiftlite.model.balance import Balance, RoutedTokens
from swiftlite.model.cache import Cache
from swiftlite.model.chunked_loss import TrunkStates, Words, chunked_loss
from swiftlite.model.context_parallel import (
    gather_sequence,
    padded_cu_seqlens,
    sequence_lengths,
    zigzag_positions,
)
from swiftlite.model.loss import (
    IGNORE_INDEX,
    MAX_POSITIONS,
    Picked,
    TokenLoss,
    distillation_loss,
    pick,
    sharing,
    token_loss,
    vocab_parallel_argmax,
)
from swiftlite.model.mtp import UnrolledLayer
from swiftlite.model.recompute import TransformerBlock
from swiftlite.model.rope import RotaryEmbedding
from swiftlite.model.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding

FED = "fed"
"""Under which a cache keeps the trunk's states that the heads take."""


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


@dataclass(frozen=True)
class TrunkOutput:
    """What a frozen trunk makes of a micro-batch: all that heads and their losses need of it.

    Attributes:
        states_SBH: as `GPTModel.forward_decoder` gives them.
        loss: of the trunk's own predictions.
    """

    states_SBH: torch.Tensor
    loss: TokenLoss


class GPTModel(McoreGPTModel):
    """megatron-core's GPTModel with its forward pass rewritten as four stages.

    The stock forward needs labels as soon as there are MTP layers, weighs the MTP loss by local token counts, and hides
    it from the caller (gpt_model.py:611-661 of 0.16.1). Here each stage returns what it made.

    Args:
        rotary_pos_emb: makes cosines and sines for all layers.
        transformer_layer_spec: the decoder layers of this stage and the norm behind the last one.
        pg_collection: the groups of the model's mesh.
        heads: the MTP heads.
        trunk_is_frozen: embedding, decoder and the trunk's loss are computed without gradient. Which parameters learn
            is for the caller to say (`requires_grad`).
        drafting: what MTP layers are fed.
        loss_in_chunks: losses are made a chunk of positions at a time (`chunked_loss.py`), instead of from all logits.
        mtp_loss: what the heads learn: the data's tokens by cross-entropy (ce), or the trunk's own distribution of
            them, from which no gradient flows back (kl, tv: `distillation_loss`).
        kwargs: of megatron-core's GPTModel.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        rotary_pos_emb: RotaryEmbedding,
        transformer_layer_spec: TransformerBlockSubmodules,
        pg_collection: ProcessGroupCollection,
        heads: Heads = Heads(),
        trunk_is_frozen: bool = False,
        drafting: Drafting = Drafting(),
        mtp_loss: MtpLoss = "ce",
        loss_in_chunks: bool = False,
        vp_stage: int | None = None,
        **kwargs: Any,
    ):
        # The stock constructor names its own class of block. It gets no layers to build, and ours takes the place.
        no_layers: Any = TransformerBlockSubmodules(layer_specs=[])
        super().__init__(
            config=config, transformer_layer_spec=no_layers, pg_collection=pg_collection, vp_stage=vp_stage, **kwargs
        )
        self.decoder = TransformerBlock(
            config=config,
            spec=transformer_layer_spec,
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        self.rotary_pos_emb = rotary_pos_emb
        self.heads = heads
        self.trunk_is_frozen = trunk_is_frozen
        self.drafting = drafting
        self.mtp_loss: MtpLoss = mtp_loss
        self.loss_in_chunks = loss_in_chunks
        self.register_buffer("_drafted_rows", self._find_drafted_rows(), persistent=False)
        self._low_precision = {"fp8": config.fp8, "fp4": config.fp4}

    def train(self, mode: bool = True) -> "GPTModel":
        """As any module. Low precision is training's: what is evaluated or answers computes as engines will, and its
        rows may have any length."""
        for module in self.modules():
            if isinstance(config := getattr(module, "config", None), TransformerConfig):
                for name, value in self._low_precision.items():
                    setattr(config, name, value if mode else None)
        return super().train(mode)

    def setup_embeddings_and_output_layer(self) -> None:
        """Part of the stock constructor, called once embedding and output layer are there; both become ours."""
        if self.pre_process or self.mtp_process:
            stock = self.embedding.word_embeddings
            self.embedding.word_embeddings = VocabParallelEmbedding.in_place_of(
                stock, self.config, self.pg_collection.tp
            )
        if self.post_process:
            del self.output_layer  # first, or both would be in memory
            self.output_layer = self._make_output_layer()
        super().setup_embeddings_and_output_layer()

    def _find_drafted_rows(self) -> torch.Tensor:
        """Which rows of this rank's part of the output matrix are of the draft vocabulary."""
        group: Any = self.pg_collection.tp
        num_rows = self.vocab_size // group.size()
        row_V = torch.tensor(self.heads.draft_vocab, dtype=torch.int64) - group.rank() * num_rows
        return row_V[(row_V >= 0) & (row_V < num_rows)]

    def _make_output_layer(self) -> ColumnParallelLinear:
        # It is given whole sequences: they are gathered before positions are picked from them (`whole_sequence`).
        config = copy.copy(self.config)
        config.sequence_parallel = False
        assert config.init_method is not None
        # A tied head on the stage of MTP layers is their embedding. megatron-core would allocate a second weight there,
        # which nothing uses, and then refuse to save it (gpt_model.py:249, language_module.py:341 of 0.16.1).
        has_embedding = self.pre_process or self.mtp_process
        return ColumnParallelLinear(
            config.hidden_size,
            self.vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=self.share_embeddings_and_output_weights and has_embedding,
            tp_group=self.pg_collection.tp,
        )

    @property
    def _is_behind_heads(self) -> bool:
        """Whether the heads are on an earlier stage, so that only losses are left to compute here."""
        return bool(self.heads.drafts) and self.post_process and not self.mtp_process

    def _frozen(self) -> AbstractContextManager:
        """Around what belongs to the trunk."""
        return torch.no_grad() if self.trunk_is_frozen else nullcontext()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        mtp_input_ids: Sequence[torch.Tensor] | torch.Tensor | None = None,
        mtp_labels: Sequence[torch.Tensor] | torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequences: torch.Tensor | None = None,
        balance: Balance | None = None,
        cache: Cache | None = None,
        predicted: torch.Tensor | None = None,
        trunk: TrunkOutput | None = None,
    ) -> Logits | Losses | torch.Tensor:
        """The stages that this rank holds; on a model that is not split, all four.

        Attention is causal: rows are padded at the end, so no mask is needed.

        Args:
            input_ids: [B, S].
            position_ids: [B, S].
            labels: [B, S], labels[b, s] the token at s + 1, IGNORE_INDEX where nothing is to be learned. On the host,
                or the loss waits for the device (`loss.pick`).
            mtp_input_ids: [B, S] for each depth k, the token at s + k. Unset: `input_ids` shifted inside each sequence,
                which is right unless context-parallel ranks share the row.
            mtp_labels: [B, S] for each depth k, the token at s + k + 1; unset as above.
            packed_seq_params: of a packed row, B = 1: its sequences, none of which sees another.
            sequences: int64 [K, B, S], `Batch.sequence_KBS`; without it no router counts its load.
            balance: of the global batch; without it no router has a load-balancing loss.
            cache: of rows that grow: the tokens are those of a pass over them, B = 1. A pass is the trunk's, or with
                `mtp_input_ids` the heads', over tokens that the trunk has had.
            predicted: with a cache, the tokens of the pass after which a prediction is wanted.
            trunk: `trunk_output` of these tokens and labels, if it is known already; on a model that is no pipeline.

        Returns:
            On the last pipeline stage Losses with labels, Logits without; with a cache, instead of these, the most
            likely token of the trunk or of each depth, int64 [1 or D, N]. Elsewhere what the next stage takes.
        """
        if cache is not None:
            assert predicted is not None
            states_SBH = self._grow(input_ids, position_ids, mtp_input_ids, cache)
            if not self.post_process:
                return torch.cat(states_SBH)
            of_heads = mtp_input_ids is not None
            return torch.stack([self._most_likely(hidden_SBH, predicted, of_heads) for hidden_SBH in states_SBH])

        num_drafts = self.heads.drafts
        cu_seqlens = padded_cu_seqlens(packed_seq_params)
        if mtp_input_ids is None:
            mtp_input_ids = ahead(input_ids, num_drafts, 0, cu_seqlens)[1:]
        if labels is not None and mtp_labels is None:
            mtp_labels = ahead(labels, num_drafts, IGNORE_INDEX, cu_seqlens)[1:]

        if self._is_behind_heads:
            received: Any = self.decoder.input_tensor
            states_SBH = list(received.chunk(1 + num_drafts))
        else:
            trunk_tokens, *mtp_tokens = self._routed_tokens(sequences, balance, cu_seqlens)
            if trunk is None:
                trunk_SBH, rotary_pos_emb = self._trunk(input_ids, position_ids, packed_seq_params, trunk_tokens)
            else:
                trunk_SBH, rotary_pos_emb = trunk.states_SBH, self._turns(position_ids, packed_seq_params)
            states_SBH = [trunk_SBH]
            if self.mtp_process:
                fed_SBH = trunk_SBH
                if self.drafting.takes_before_norm:
                    fed_SBH, trunk_SBH = trunk_SBH.chunk(2)  # see `norm.keeping`
                heads_SBH = self.forward_mtp(
                    fed_SBH, list(mtp_input_ids), position_ids, rotary_pos_emb, packed_seq_params, mtp_tokens
                )
                states_SBH = [trunk_SBH, *heads_SBH]

        if not self.post_process:
            return torch.cat(states_SBH)
        all_labels = None if labels is None or mtp_labels is None else [labels, *mtp_labels]
        return self.forward_postprocess(states_SBH, all_labels, cu_seqlens, trunk and trunk.loss)

    @torch.no_grad()
    def trunk_output(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        labels: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> TrunkOutput:
        """What the trunk makes of a micro-batch, for `forward`; of a frozen trunk that is no pipeline.

        Args:
            input_ids, position_ids, labels, packed_seq_params: as for `forward`.
        """
        states_SBH, _ = self._trunk(input_ids, position_ids, packed_seq_params)
        last_SBH = states_SBH.chunk(2)[1] if self.drafting.takes_before_norm else states_SBH
        return TrunkOutput(states_SBH, self._cross_entropy(last_SBH, labels))

    def _routed_tokens(
        self, sequences: torch.Tensor | None, balance: Balance | None, cu_seqlens: torch.Tensor | None
    ) -> list[RoutedTokens | None]:
        """What routers are told in the trunk and at each MTP depth."""
        if sequences is None:
            return [None] * (1 + self.heads.drafts)
        num_sequences = sequences.size(1) if cu_seqlens is None else len(cu_seqlens) - 1
        step_weights = self.heads.weights if self.heads.unroll > 1 else (1.0,) * self.heads.layers
        all_tokens = []
        for depth, weight in enumerate((1.0, *step_weights)):
            sequence_SB = self._on_this_sequence_rank(sequences[depth].T)
            load_weight = weight / step_weights[0] if depth else 1.0
            tokens = RoutedTokens(sequence_SB, num_sequences, load_weight)
            if balance is not None and balance.tokens[depth]:
                tokens = replace(tokens, mean_weight=weight / balance.tokens[depth], divisor=balance.divisor)
            all_tokens.append(tokens)
        return all_tokens

    def _on_this_sequence_rank(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor [S, ...] that belongs to this sequence-parallel rank."""
        if not self.config.sequence_parallel:
            return tensor
        tp = self.pg_collection.tp
        return tensor.chunk(tp.size())[tp.rank()]

    def _grow(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        mtp_input_ids: Sequence[torch.Tensor] | torch.Tensor | None,
        cache: Cache,
    ) -> list[torch.Tensor]:
        """The states that a pass over growing rows sends on: the trunk's, or the heads'."""
        received: Any = self.decoder.input_tensor
        if mtp_input_ids is None:
            if self._is_behind_heads:
                return [received]
            trunk_SBH, _ = self._trunk(input_ids, position_ids, None, cache=cache)
            if any(span.start == 0 for span in cache.spans):
                self._check_use(cache)
            if self.mtp_process:
                fed_SBH = trunk_SBH
                if self.drafting.takes_before_norm:
                    fed_SBH, trunk_SBH = trunk_SBH.chunk(2)
                cache.keep(FED, self.whole_sequence(fed_SBH))
            return [trunk_SBH]
        if self.mtp_process:
            fed_SBH = cache.kept(FED, input_ids.size(1))
            if self.config.sequence_parallel:
                fed_SBH = scatter_to_sequence_parallel_region(fed_SBH, group=self.pg_collection.tp)
            turns = self._turns(position_ids, None, cache=cache)
            return self.forward_mtp(fed_SBH, list(mtp_input_ids), position_ids, turns, cache=cache)
        if self.pre_process:  # nothing to say, and the next stage waits for something
            return [torch.zeros(1, 1, self.config.hidden_size, dtype=self.config.pipeline_dtype, device=cache.device)]
        return list(received.chunk(self.heads.drafts)) if self._is_behind_heads else [received]

    def _check_use(self, cache: Cache) -> None:
        """Every layer of the trunk keeps what later tokens need of earlier ones; otherwise they would not see these."""
        for layer in self.decoder.layers:
            if not cache.is_used_by(layer):
                problem = f"layer {layer.layer_number} keeps nothing of earlier tokens, so it cannot continue prompts"
                raise UserError(problem, "add --acceptance_samples 0")

    def _most_likely(self, hidden_SBH: torch.Tensor, predicted: torch.Tensor, of_heads: bool) -> torch.Tensor:
        """The tokens [N] that the output layer makes of states at some places of a flat row."""
        hidden_NH = self.whole_sequence(hidden_SBH)[predicted, 0]
        output = self._output(of_heads)
        token_N = torch.empty_like(predicted)
        for start in range(0, len(predicted), MAX_POSITIONS):
            some = slice(start, start + MAX_POSITIONS)
            logits_NV = output.logits(hidden_NH[some])
            token_N[some] = vocab_parallel_argmax(logits_NV, sharing(self.pg_collection.tp), output.tokens_V)
        return token_N

    def _trunk(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        packed_seq_params: PackedSeqParams | None,
        tokens: RoutedTokens | None = None,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The trunk's states behind this stage's layers, see the top of this file; and what turns queries and keys."""
        with self._frozen():
            hidden_SBH, rotary_pos_emb = self.forward_preprocess(input_ids, position_ids, packed_seq_params, cache)
            hidden_SBH = self.forward_decoder(hidden_SBH, rotary_pos_emb, packed_seq_params, tokens, cache)
        if self.trunk_is_frozen and not self.pre_process:
            hidden_SBH = _NoGradient.apply(hidden_SBH, self.decoder.input_tensor)
        return hidden_SBH, rotary_pos_emb

    def forward_preprocess(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Embeddings [S, B, H], on the first pipeline stage, and `RotaryEmbedding`'s cosines and sines."""
        hidden_SBH = None
        if self.pre_process:
            hidden_SBH = self.embedding(input_ids=input_ids, position_ids=position_ids)
        return hidden_SBH, self._turns(position_ids, packed_seq_params, cache=cache)

    def forward_decoder(
        self,
        hidden_SBH: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        tokens: RoutedTokens | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """The trunk's states [S, B, H] after this stage's layers; after the last layer, also after the final norm, or
        those before and after it [2S, B, H] if MTP layers take the former.

        Args:
            hidden_SBH: embeddings; on later pipeline stages None, they take what `set_input_tensor` was given.
            tokens: what routers are told of them.
        """
        return self.decoder(
            hidden_states=hidden_SBH,
            attention_mask=cache,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            padding_mask=tokens,
        )

    def forward_mtp(
        self,
        hidden_SBH: torch.Tensor,
        mtp_input_ids: Sequence[torch.Tensor],
        position_ids: torch.Tensor,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        tokens: Sequence[RoutedTokens | None] | None = None,
        cache: Cache | None = None,
    ) -> list[torch.Tensor]:
        """States [S, B, H] of each MTP depth, after its output norm; depth k feeds depth k + 1.

        Args:
            hidden_SBH: the trunk's, as `Drafting` says.
            tokens: what routers are told at each depth.
        """
        tokens = tokens or [None] * self.heads.drafts
        if self.heads.unroll > 1:
            return self._unrolled(hidden_SBH, mtp_input_ids, position_ids, packed_seq_params, tokens, cache)
        states_SBH = []
        for layer, input_ids, tokens_of_depth in zip(self.mtp.layers, mtp_input_ids, tokens, strict=True):
            hidden_SBH = layer(
                hidden_SBH,
                self._embed_for_head(input_ids, position_ids),
                attention_mask=cache,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                padding_mask=tokens_of_depth,
            )
            states_SBH.append(hidden_SBH)
        return states_SBH

    def _unrolled(
        self,
        hidden_SBH: torch.Tensor,
        mtp_input_ids: Sequence[torch.Tensor],
        position_ids: torch.Tensor,
        packed_seq_params: PackedSeqParams | None,
        tokens: Sequence[RoutedTokens | None],
        cache: Cache | None,
    ) -> list[torch.Tensor]:
        """`forward_mtp` of one layer over several steps."""
        (layer,) = self.mtp.layers
        assert isinstance(layer, UnrolledLayer)
        first, *later = mtp_input_ids  # from position 0, step j stands at position j - 1
        embeddings_SBH = [self._embed_for_head(first, position_ids)]
        for input_ids in later:
            embeddings_SBH.append(self.embedding(input_ids=input_ids, position_ids=position_ids))
        return layer.forward_steps(
            hidden_SBH,
            embeddings_SBH,
            [self._turns(position_ids, packed_seq_params, step, cache) for step in range(self.heads.unroll)],
            packed_seq_params,
            tokens,
            cache=cache,
            recycles_before_norm=self.drafting.recycles_before_norm,
        )

    def _embed_for_head(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [S, B, H] as a head is given them: of nothing, at the position where its engine gives it none."""
        embeddings_SBH = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if not self.drafting.zeroes_first_embedding:
            return embeddings_SBH
        is_first_SB1 = self._on_this_sequence_rank((position_ids == 0).T[..., None])
        return embeddings_SBH.masked_fill(is_first_SB1, 0)

    def _turns(
        self,
        position_ids: torch.Tensor,
        packed_seq_params: PackedSeqParams | None,
        offset: int = 0,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """What turns the tokens of this rank, of sequences that begin at position `offset`: [2, S, 1, 1, R]."""
        if cache is not None:
            return self.rotary_pos_emb([cache.capacity], offset)[:, position_ids[0]]
        group: Any = self.pg_collection.cp
        lengths = sequence_lengths(position_ids.size(1) * group.size(), padded_cu_seqlens(packed_seq_params))
        row = self.rotary_pos_emb(lengths, offset)
        if group.size() == 1:
            return row
        return row[:, zigzag_positions(lengths, group.rank(), group.size(), row.device)]

    def forward_postprocess(
        self,
        states_SBH: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor] | None = None,
        cu_seqlens: torch.Tensor | None = None,
        main: TokenLoss | None = None,
    ) -> Logits | Losses:
        """The output layer over the trunk's and the heads' states: losses with labels, else logits.

        Args:
            states_SBH: the trunk's, then each depth's.
            labels: [B, S] for the trunk, then for each depth.
            cu_seqlens: of a packed row: where its padded sequences start, in the whole row.
            main: the trunk's loss, if it is known already.
        """
        if labels is None:
            logits = [self.logits(self.whole_sequence(hidden_SBH)).transpose(0, 1) for hidden_SBH in states_SBH]
            return Logits(logits[0], logits[1:])
        if main is None:
            with self._frozen():
                main = self._cross_entropy(states_SBH[0], labels[0])
        heads = list(zip(states_SBH[1:], labels[1:], strict=True))
        if self.mtp_loss == "ce":
            return Losses(main, [self._cross_entropy(hidden_SBH, labels_BS) for hidden_SBH, labels_BS in heads])
        trunk_TBH, positions_S = self._whole_rows(states_SBH[0].detach(), cu_seqlens)
        output = self._output(of_heads=True)
        mtp = [
            self._distillation(hidden_SBH, labels_BS, output, trunk_TBH, positions_S + depth)
            for depth, (hidden_SBH, labels_BS) in enumerate(heads, start=1)
        ]
        return Losses(main, mtp)

    def logits(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """[S, B, V] for this rank's part of the vocabulary."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_SBH, weight=weight)[0]

    def _cross_entropy(self, hidden_SBH: torch.Tensor, labels_BS: torch.Tensor) -> TokenLoss:
        picked = pick(labels_BS, hidden_SBH.device)
        states_NH = self._picked_states(hidden_SBH, picked)
        tp = self.pg_collection.tp
        if self.loss_in_chunks:
            return chunked_loss(states_NH, self._output_weight(), Words(picked.word_N), picked, tp)
        return token_loss(self._output(of_heads=False).logits(states_NH), picked, tp)

    def _distillation(
        self,
        hidden_SBH: torch.Tensor,
        labels_BS: torch.Tensor,
        output: "_Output",
        trunk_TBH: torch.Tensor,
        positions_S: torch.Tensor,
    ) -> TokenLoss:
        """The distance of a head to what the trunk predicts of the same tokens.

        At position s, depth k predicts the token s + k + 1, which the trunk predicts at s + k. That may be another
        rank's: of a row of 8 on 2 ranks, rank 0 holds positions 0 1 6 7, and what depth 1 learns at position 1 the
        trunk says at 2. Where there is a label, s + k is in the same sequence.

        Args:
            trunk_TBH: the trunk's states of whole rows.
            positions_S: s + k of each position s.
        """
        assert self.mtp_loss != "ce"
        picked = pick(labels_BS, hidden_SBH.device)
        states_NH = self._picked_states(hidden_SBH, picked)
        trunk_NH = trunk_TBH[positions_S[picked.place_N], picked.row_N]
        tp = self.pg_collection.tp
        if self.loss_in_chunks:
            target = TrunkStates(trunk_NH, self.mtp_loss)
            return chunked_loss(states_NH, output.weight_VH, target, picked, tp, output.tokens_V)

        def trunk_logits(rows: slice) -> torch.Tensor:
            return output.logits(trunk_NH[rows])

        logits_NV = output.logits(states_NH)
        return distillation_loss(logits_NV, trunk_logits, self.mtp_loss, picked, tp, output.tokens_V)

    def _picked_states(self, hidden_SBH: torch.Tensor, picked: Picked) -> torch.Tensor:
        """[N, H]: only positions that have a target meet the vocabulary; prompts and padding are often half of them."""
        hidden_SBH = self.whole_sequence(hidden_SBH)
        # One index into S * B states: picked from [B, S] the gradient would be laid out so, and every layer would copy.
        return hidden_SBH.flatten(0, 1)[picked.place_N * hidden_SBH.size(1) + picked.row_N]

    def _output(self, of_heads: bool) -> "_Output":
        """The output layer as the trunk has it, or the heads, which may have a draft vocabulary."""
        weight = self._output_weight()
        if not (of_heads and self.heads.draft_vocab):
            return _Output(lambda hidden_NH: self.logits(hidden_NH[:, None]).squeeze(1), weight, None)
        group: Any = self.pg_collection.tp
        rows_V = self._drafted_rows
        assert isinstance(rows_V, torch.Tensor)
        # No gradient: heads have a draft vocabulary where the trunk stays (`rules.sft_heads`).
        weight_VH = weight.detach()[rows_V]

        def logits(hidden_NH: torch.Tensor) -> torch.Tensor:
            return F.linear(copy_to_tensor_model_parallel_region(hidden_NH, group), weight_VH)

        return _Output(logits, weight_VH, rows_V + group.rank() * len(weight))

    def _output_weight(self) -> torch.Tensor:
        """The matrix [V, H] of the output layer, which may be the embedding's."""
        is_tied = self.share_embeddings_and_output_weights
        weight: Any = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        return weight

    def _whole_rows(
        self, trunk_SBH: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The trunk's states [T, B, H], and which positions [S] of them this context-parallel rank holds."""
        group: Any = self.pg_collection.cp
        trunk_SBH = self.whole_sequence(trunk_SBH)
        lengths = sequence_lengths(trunk_SBH.size(0) * group.size(), cu_seqlens)
        positions_S = zigzag_positions(lengths, group.rank(), group.size(), trunk_SBH.device)
        if group.size() > 1:
            trunk_SBH = gather_sequence(trunk_SBH, lengths, group)
        return trunk_SBH, positions_S

    def whole_sequence(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """All positions of the row, gathered over sequence-parallel ranks."""
        if not self.config.sequence_parallel:
            return hidden_SBH
        # Each rank's gradient is whole already: the output layer sums it over the ranks, so backward only cuts it.
        return gather_from_sequence_parallel_region(
            hidden_SBH, tensor_parallel_output_grad=False, group=self.pg_collection.tp
        )


@dataclass(frozen=True)
class _Output:
    """What makes logits [N, V] of states [N, H] by a matrix [V, H], and the token of each if they are not the whole
    vocabulary."""

    logits: Callable[[torch.Tensor], torch.Tensor]
    weight_VH: torch.Tensor
    tokens_V: torch.Tensor | None


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
