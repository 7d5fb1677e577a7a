"""megatron-core's GPTModel with a forward pass of four methods, which can be called separately.

    forward_preprocess    tokens               -> embeddings
    forward_decoder       embeddings           -> the trunk's states, after the final norm
    forward_mtp           states, tokens       -> one tensor of states per MTP depth
    forward_postprocess   all states           -> losses if there is a target, otherwise logits

A reward model has `scores` instead of the last one. `forward` calls them in this order. With pipeline parallelism, each
rank runs its part of the layers and sends the hidden states to the next rank as one tensor (`stage_states.py`).
Decoding with a cache calls the same methods from `decode.py`. Logits and losses are in `output_layers.py` and
`prediction_losses.py`.

Shapes: S sequence (of this context- and sequence-parallel rank), B batch, H hidden size, V vocabulary on this
tensor-parallel rank, D MTP depth, R rotary channels.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel as McoreGPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftlite.args.fields import MtpLoss
from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP
from swiftlite.families.architecture import Outside
from swiftlite.model.attention.cache import Cache
from swiftlite.model.attention.rope import RotaryEmbedding, RotaryEmbeddings
from swiftlite.model.attention.sparse import Selections, in_place_of_mask
from swiftlite.model.context_parallel import sequence_lengths, zigzag_positions
from swiftlite.model.copied_config import with_settings
from swiftlite.model.drafter import DrafterLayer, DraftInputs
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.layers.deepstack import Deepstack
from swiftlite.model.layers.norm import SharedNorm
from swiftlite.model.layers.recompute import TransformerBlock
from swiftlite.model.layers.streamed import StreamedBlock
from swiftlite.model.layers.tensor_parallel import (
    AddsGradients,
    ColumnParallelLinear,
    VocabParallelEmbedding,
    sum_over_sequence_ranks,
)
from swiftlite.model.loss.balance import RoutedTokens, routed_tokens
from swiftlite.model.loss.losses import TokenLoss
from swiftlite.model.output_layers import OutputLayers
from swiftlite.model.prediction_losses import PredictionLosses
from swiftlite.model.settings import ModelSettings, Stage
from swiftlite.model.shared_states import SharedStates
from swiftlite.model.stage_states import StageStates
from swiftlite.model.tower import Placed, TowerInputs


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
    """The output of a frozen trunk for a micro-batch, which the heads and their losses read.

    Attributes:
        states: the trunk's hidden states.
        loss: loss of the trunk's predictions.
        tower_outputs: outputs of the tower that the heads read, [I, H]; None for a model without a tower.
    """

    states: StageStates
    loss: TokenLoss
    tower_outputs: torch.Tensor | None = None


class GPTModel(AddsGradients, McoreGPTModel):
    """megatron-core's GPTModel with its forward pass rewritten as four methods.

    If there are MTP layers, the forward method of megatron-core requires labels, weights the MTP loss by local token
    counts, and does not return this loss (gpt_model.py:611-661 of 0.16.1). Here each method returns its result.

    Args:
        stage: the part of the model on this pipeline stage.
        outside: sizes of embedding and output layer, and factors of embeddings and logits.
        rotary_pos_emb: computes cosines and sines for all layers.
        pg_collection: the groups of the model's mesh.
    """

    def __init__(
        self,
        config: TransformerConfig,
        settings: ModelSettings,
        stage: Stage,
        outside: Outside,
        rotary_pos_emb: RotaryEmbedding | RotaryEmbeddings,
        pg_collection: ProcessGroupCollection,
    ):
        # megatron-core's constructor creates its own block. It gets no layers, and swiftlite's block replaces it.
        no_layers: Any = TransformerBlockSubmodules(layer_specs=[])
        mtp_block: Any = stage.mtp_block  # annotated as a ModuleSpec; MultiTokenPredictionBlock takes either
        super().__init__(
            config=config,
            transformer_layer_spec=no_layers,
            vocab_size=outside.vocab,
            max_sequence_length=0,  # read only for learned positions
            pre_process=stage.is_first,
            post_process=stage.is_last,
            share_embeddings_and_output_weights=outside.is_tied,
            position_embedding_type="none",
            mtp_block_spec=mtp_block,
            pg_collection=pg_collection,
            vp_stage=stage.vp_stage,
        )
        self.heads, self.drafting = settings.heads, settings.drafting
        self.trunk_is_frozen = settings.freeze_trunk
        self.trains_only_indexers = settings.indexer.indexer_mode == "indexer_only"
        self.mtp_loss: MtpLoss = settings.mtp_loss
        self.loss_in_chunks = settings.loss_in_chunks
        self.detached_heads = settings.detached_heads
        self.temperature = settings.temperature
        self.is_teacher = settings.is_teacher
        self.embedding_multiplier = _embedding_multiplier(outside, config.params_dtype)
        self.logits_divisor, self.logits_cap = outside.logits_divisor, outside.logits_cap
        self.has_score = outside.has_score
        if self.has_score and self.post_process:
            self.output_layer = self._make_score()
        self.rotary_pos_emb = rotary_pos_emb
        self.tower, self.sent_outputs, self.features = stage.tower, stage.sent_outputs, stage.features
        self.stage_number, self.sharing, self.own_inputs = stage.number, stage.sharing, None
        if stage.own_inputs is not None:
            self.own_inputs = stage.own_inputs(vocab=self.vocab_size, tp_group=pg_collection.tp)
        block_class = TransformerBlock if settings.holds_layers else StreamedBlock
        self.decoder = block_class(
            config=config,
            spec=stage.decoder,
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=pg_collection,
            vp_stage=stage.vp_stage,
        )
        self._complete_heads(outside)
        # With sequence parallelism, each rank writes the tower's outputs only into its part of the row.
        if self.tower is not None:
            sum_over_sequence_ranks(config, self.tower.parameters())
        # Not persistent: the rows depend on the tensor-parallel rank, and follow from `Heads.draft_vocab`.
        self.register_buffer("drafted_rows", self._find_drafted_rows(), persistent=False)
        self.returns_matrix_gradient = True
        self._low_precision = {"fp8": config.fp8, "fp4": config.fp4}

    # Not attributes: with references in both directions, a model would be freed only by the garbage collector.
    @property
    def output_layers(self) -> OutputLayers:
        """The output layers of trunk and heads."""
        return OutputLayers(self)

    @property
    def losses(self) -> PredictionLosses:
        """The losses of the predictions."""
        return PredictionLosses(self)

    def add_gradients_in_place(self) -> None:
        """Return no gradient of the output matrix to autograd if the loss has added it to `main_grad`."""
        self.returns_matrix_gradient = False

    def _make_score(self) -> nn.Module:
        """Return the output layer of a reward model. Each tensor-parallel rank has the whole matrix: it has one row."""
        score = nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)
        score.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        return score

    def _complete_heads(self, outside: Outside) -> None:
        """Give the heads on this stage what they share with the trunk, or have themselves: norms and output layers."""
        if not self.mtp_process:
            return
        final_norm: Any = self.decoder.final_layernorm
        have_output_layers = self.heads.has_output_layer
        if self.heads.kind == MTP:
            have_output_layers = outside.heads_have_output_layers
        for head in self.mtp.layers:
            output_norm = getattr(head, "final_layernorm", None)  # only MTP heads have one
            if isinstance(output_norm, SharedNorm):
                output_norm.of = (final_norm,)  # in a tuple, so that it is not registered as a submodule
                output_norm.is_detached = self.detached_heads
            if have_output_layers:
                head.output_layer = self._make_output_layer(getattr(head, "state_size", self.config.hidden_size))
            if isinstance(head, DrafterLayer) and self.decoder.holds_layers:
                head.connect([self.decoder.layers[layer] for layer in self.features.layers])

    def forward(
        self, inputs: ModelInputs, target: Target | None = None, trunk: TrunkOutput | None = None
    ) -> Logits | Losses | torch.Tensor:
        """Run the methods of this pipeline stage. Without pipeline parallelism, these are all four.

        Args:
            target: what the predictions are compared with; None: return logits.
            trunk: `trunk_output` of these inputs, if it was already computed; not supported with pipeline parallelism.

        Returns:
            Losses if there is a target, otherwise Logits; with `is_teacher`, the states at positions with a label; of a
            reward model the scores [B, S].
            Before the last pipeline stage: the states for the next stage, as one tensor (`StageStates.to_wire`), and
            outputs of the tower (`SentOutputs`).

        Raises:
            UserError: the model has a tower, but the inputs have none for it.
        """
        tower_outputs = None
        if self.follows_heads:
            # The schedule sets the received tensor there (`GPTModel.set_input_tensor`), also without decoder layers.
            states = StageStates.from_wire(self.decoder.input_tensor, num_heads=self.heads.drafts)
        else:
            tower_outputs = trunk.tower_outputs if trunk else self._tower_outputs(inputs.tower_inputs)
            states = self._states(inputs, tower_outputs, trunk)
        if not self.post_process:
            return self.sent_outputs.append(states.to_wire(), tower_outputs)
        if self.has_score:
            return self.scores(states.trunk_SBH)
        if target is None:
            return self.forward_postprocess(states)
        if self.is_teacher:
            return self.losses.label_states(states.trunk_SBH, target.labels)
        main = trunk.loss if trunk else None
        if target.teacher is not None:
            main = self.losses.divergence(states.trunk_SBH, target)
        return self.forward_postprocess(states, target, inputs.cu_seqlens, main)

    def _states(self, inputs: ModelInputs, outputs: torch.Tensor | None, trunk: TrunkOutput | None) -> StageStates:
        """Return the states of the trunk, or of its part on this stage, and of the heads if they are on this stage.

        Args:
            outputs: outputs of the tower.
            trunk: the trunk's output, if it was already computed.
        """
        trunk_tokens, *mtp_tokens = self._routed_tokens(inputs)
        trunk_placed, *mtp_placed = self._placed(inputs.tower_inputs, outputs)
        rotary_emb = self.rotary_emb(inputs)
        if trunk is None:
            states = self._trunk(inputs, rotary_emb, trunk_tokens, trunk_placed)
        else:
            states = trunk.states
        if not self.mtp_process:
            return states

        def rotary(offset: int) -> torch.Tensor:
            # Only unrolled heads and blocks have an offset; without one, the heads share the trunk's.
            return self.rotary_emb(inputs, offset) if offset else rotary_emb

        input_SBH = states.head_input(self.heads.reads_state)
        heads_SBH = self.forward_mtp(
            input_SBH.detach() if self.detached_heads else input_SBH,
            inputs.tokens_of_heads(self.heads.drafts),
            inputs.position_ids,
            rotary,
            inputs.packed_seq_params,
            mtp_tokens,
            placed=mtp_placed,
            drafted=inputs.drafted,
        )
        # Without the state before the norm and the features, which no later stage reads.
        return StageStates(states.trunk_SBH, heads_SBH=heads_SBH)

    @torch.no_grad()
    def trunk_output(self, inputs: ModelInputs, labels: torch.Tensor) -> TrunkOutput:
        """Compute the argument `trunk` of `forward`, for a frozen trunk without pipeline parallelism.

        Args:
            labels: as for `Target`.
        """
        outputs = self._tower_outputs(inputs.tower_inputs)
        placed = self._placed(inputs.tower_inputs, outputs)[0]
        states = self._trunk(inputs, self.rotary_emb(inputs), placed=placed)
        if outputs is not None:
            outputs = outputs[:, : self.config.hidden_size]  # heads do not read further outputs (deepstack)
        return TrunkOutput(states, self.losses.cross_entropy(states.trunk_SBH, labels), outputs)

    @torch.no_grad()
    def streamed_input(self, inputs: ModelInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the input [S, B, H] of the first decoder layer, for a trunk that is streamed, and the outputs [I, H]
        of the tower; None without a tower.
        """
        outputs = self._tower_outputs(inputs.tower_inputs)
        placed = self._placed(inputs.tower_inputs, outputs)[0]
        return self._embed(inputs.input_ids, inputs.position_ids, placed), outputs

    @torch.no_grad()
    def streamed_output(
        self,
        hidden_SBH: torch.Tensor,
        labels: torch.Tensor,
        tower_outputs: torch.Tensor | None = None,
        features_SBH: Sequence[torch.Tensor] = (),
    ) -> TrunkOutput:
        """Compute the result of `trunk_output` from the output [S, B, H] of the last decoder layer.

        Args:
            labels: as for `Target`.
            tower_outputs: outputs of the tower, from `streamed_input`.
            features_SBH: inputs of the layers in `Heads.features`.
        """
        final_norm: Any = self.decoder.final_layernorm
        states = replace(self.split_decoder_output(final_norm(hidden_SBH)), features_SBH=features_SBH)
        return TrunkOutput(states, self.losses.cross_entropy(states.trunk_SBH, labels), tower_outputs)

    @property
    def follows_heads(self) -> bool:
        """Whether the heads are on an earlier pipeline stage, so that this stage only computes the losses."""
        return bool(self.heads.drafts) and self.post_process and not self.mtp_process

    def _trunk(
        self,
        inputs: ModelInputs,
        rotary_emb: torch.Tensor,
        tokens: RoutedTokens | None = None,
        placed: Placed | None = None,
    ) -> StageStates:
        """Run the embedding and the decoder layers of this stage. If the trunk is frozen, no gradients are computed."""
        received: Any = self.decoder.input_tensor
        mask = in_place_of_mask(self.decoder.layers, None, tokens, is_frozen=self.trunk_is_frozen)
        with self._frozen(), self.features.collected(self.decoder) as features_SBH:
            hidden_SBH = self.forward_preprocess(inputs.input_ids, inputs.position_ids, placed)
            hidden_SBH = self.forward_decoder(
                hidden_SBH, rotary_emb, inputs.packed_seq_params, tokens, mask, placed, inputs.input_ids
            )
        if self.trunk_is_frozen and not self.pre_process:
            hidden_SBH = _NoGradient.apply(hidden_SBH, received)
            # Also the features: a drafter that reads nothing else would leave this stage's input without a gradient.
            features_SBH = [_NoGradient.apply(each_SBH, received) for each_SBH in features_SBH]
        if isinstance(mask, Selections):
            # After `_frozen`: inside of it, the losses of indexers would be attached without a gradient.
            hidden_SBH = mask.attach_losses(hidden_SBH)
        return replace(self.split_decoder_output(hidden_SBH), features_SBH=features_SBH)

    def split_decoder_output(self, hidden_SBH: Any) -> StageStates:
        """Split the output of `forward_decoder` into named states."""
        return StageStates.from_wire(
            hidden_SBH,
            has_prenorm=self.mtp_process and self.drafting.takes_before_norm,
            num_shared=self.sharing.num_blocks(self.stage_number),
        )

    def _frozen(self) -> AbstractContextManager:
        """Return the context in which the trunk is computed: without gradients if the trunk is frozen."""
        return torch.no_grad() if self.trunk_is_frozen else nullcontext()

    def rotary_emb(self, inputs: ModelInputs, offset: int = 0) -> torch.Tensor:
        """Compute cosines and sines [2, S, 1, 1, R] for the tokens of this rank (`RotaryEmbedding`).

        Padded rows with frequencies that depend on the length of the row have different ones: [2, S, B, 1, R]. So have
        tokens with positions along three axes.

        Args:
            offset: position of each sequence's first token, on all axes.
        """
        if inputs.axes_3BS is not None:
            return self.rotary_pos_emb.at(inputs.axes_3BS + offset)
        group: Any = self.pg_collection.cp
        padded = sequence_lengths(inputs.position_ids.size(1) * group.size(), inputs.cu_seqlens)
        lengths = inputs.lengths
        # Scaled frequencies (longrope, dynamic) follow from a sequence's own length, not from that of the padded row.
        if self.rotary_pos_emb.depends_on_length and inputs.packed_seq_params is None and lengths:
            row = torch.cat([self.rotary_pos_emb(padded, offset, [length]) for length in lengths], dim=2)
        else:
            row = self.rotary_pos_emb(padded, offset, lengths)
        if group.size() == 1:
            return row
        return row[:, zigzag_positions(padded, group.rank(), group.size(), row.device)]

    def _tower_outputs(self, tower_inputs: TowerInputs | None) -> torch.Tensor | None:
        """Return the outputs of the tower [I, O * H], computed on the first stage or received from the previous stage.

        Received outputs are removed from the input of the decoder. The result is None on a stage that does not read
        outputs, and for a model without a tower.
        """
        if self.tower is not None:
            if tower_inputs is None:
                problem = "the model has a tower, and this training method has no inputs for it"
                raise UserError(problem, "use a training method whose rows have these inputs")
            return self.tower(tower_inputs.items)
        if tower_inputs is None or self.pre_process:
            return None
        received: Any = self.decoder.input_tensor
        self.decoder.input_tensor, outputs = self.sent_outputs.split(received, tower_inputs.num_items)
        return outputs

    def _placed(self, tower_inputs: TowerInputs | None, outputs: torch.Tensor | None) -> list[Placed] | list[None]:
        """Return the outputs of the tower and the tokens that they replace, for the trunk and each MTP depth.

        Without outputs, each entry is None.
        """
        if tower_inputs is None or outputs is None:
            return [None] * (1 + self.heads.drafts)
        return Placed.of_depths(outputs, tower_inputs.item_KBS, self.config.hidden_size)

    def _embed(self, input_ids: torch.Tensor, position_ids: torch.Tensor, placed: Placed | None) -> torch.Tensor:
        """Look up embeddings [S, B, H], with the tower's outputs instead of placeholder tokens."""
        embeddings_SBH = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if self.embedding_multiplier != 1:
            embeddings_SBH = embeddings_SBH * self.embedding_multiplier
        if placed is None:
            return embeddings_SBH
        return placed.put_into(embeddings_SBH, self._on_this_sequence_rank(placed.item_BS.T))

    def _routed_tokens(self, inputs: ModelInputs) -> list[RoutedTokens] | list[None]:
        """Describe the tokens for the routers of the trunk and of each MTP depth; None for each without `sequences`."""
        if inputs.sequences is None:
            return [None] * (1 + self.heads.drafts)
        num_sequences = inputs.sequences.size(1)
        if inputs.cu_seqlens is not None:
            # One more if padding fills the row, which no token belongs to.
            num_sequences = len(inputs.cu_seqlens) - 1
        sequence_KSB = [self._on_this_sequence_rank(sequence_BS.T) for sequence_BS in inputs.sequences]
        return routed_tokens(sequence_KSB, num_sequences, self.heads, inputs.balance)

    # Methods 1 and 2: the trunk

    def forward_preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, placed: Placed | None = None
    ) -> torch.Tensor | None:
        """Look up embeddings [S, B, H]; None after the first pipeline stage.

        Args:
            input_ids, position_ids: [B, S].
            placed: outputs of the tower for placeholder tokens.
        """
        if not self.pre_process:
            return None
        return self._embed(input_ids, position_ids, placed)

    def forward_decoder(
        self,
        hidden_SBH: torch.Tensor | None,
        rotary_emb: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        tokens: RoutedTokens | None = None,
        mask: Cache | Selections | None = None,
        placed: Placed | None = None,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run this stage's decoder layers and, after the last layer, the final norm.

        Args:
            hidden_SBH: embeddings; None after the first pipeline stage, where the decoder reads the tensor that
                `set_input_tensor` has set.
            rotary_emb: result of `rotary_emb` for these tokens.
            tokens: description of the tokens for the routers; None: routers do not count their load.
            mask: result of `in_place_of_mask`; in decoding, tokens are added to the cache in it.
            placed: outputs of the tower, of which the first layers may add further ones (`Deepstack`).
            input_ids: [B, S]; required on the first stage if layers have inputs of their own.

        Returns:
            The trunk's states [S, B, H]. After the final norm, if the heads read the state before it: both states,
            concatenated [2S, B, H] (`norm.returning_input`). If later stages read further states of this one
            (`Sharing`), these are before the trunk's.
        """
        # megatron-core passes both masks to every layer. Attention here is always causal and routers use no mask, so
        # the arguments are used for the KV cache and the router targets, with features of images. A separate argument
        # is not possible: the block calls layers with a fixed list of arguments (transformer_block.py:765 of 0.16.1),
        # and a layer passes only the padding mask to its MLP (transformer_layer.py:514). Subclasses would have to
        # repeat both methods. Attributes of modules would not do: pipelines and recomputation interleave micro-batches.
        shared, layer_input = None, mask
        if self.sharing.is_used:
            assert not isinstance(mask, Selections)
            layer_input = shared = self._shared_states(hidden_SBH, input_ids, mask)
        padding_mask: RoutedTokens | Deepstack | None = tokens
        if placed is not None and placed.deepstack_IH:
            padding_mask = Deepstack(placed.features(self._on_this_sequence_rank(placed.item_BS.T)), tokens)
        hidden_SBH = self.decoder(
            hidden_states=hidden_SBH,
            attention_mask=layer_input,
            rotary_pos_emb=rotary_emb,
            packed_seq_params=packed_seq_params,
            padding_mask=padding_mask,
        )
        assert hidden_SBH is not None
        blocks_SBH = self.sharing.pack(shared, self.stage_number, hidden_SBH) if shared else []
        return torch.cat([*blocks_SBH, hidden_SBH]) if blocks_SBH else hidden_SBH

    def _shared_states(
        self, embedding_SBH: torch.Tensor | None, input_ids: torch.Tensor | None, cache: Cache | None
    ) -> SharedStates:
        """Return what decoder layers read in addition to the state: computed on the first stage, later received.

        Received states are removed from the input of the decoder.
        """
        if self.own_inputs is not None:
            inputs_SBLP = self.own_inputs(input_ids, embedding_SBH)
            inputs = dict(enumerate(inputs_SBLP.unbind(2)))
            return SharedStates(cache, inputs, sources=frozenset(self.sharing.sources))
        blocks_SBH: Sequence[torch.Tensor] = ()
        if number := self.sharing.num_blocks(self.stage_number - 1):
            received: Any = self.decoder.input_tensor
            *blocks_SBH, self.decoder.input_tensor = received.chunk(number + 1)
        return self.sharing.unpack(blocks_SBH, self.stage_number, cache)

    # Method 3: the heads

    def forward_mtp(
        self,
        hidden_SBH: torch.Tensor,
        mtp_input_ids: Sequence[torch.Tensor],
        position_ids: torch.Tensor,
        rotary: Callable[[int], torch.Tensor],
        packed_seq_params: PackedSeqParams | None = None,
        tokens: Sequence[RoutedTokens | None] | None = None,
        cache: Cache | None = None,
        placed: Sequence[Placed | None] | None = None,
        drafted: Callable[[], torch.Tensor | None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Return the states [S, B, H] of each draft, which the layers of the drafter compute (`DrafterLayer`).

        Args:
            hidden_SBH: the trunk's states (`StageStates.head_input`).
            mtp_input_ids: [B, S] for each depth.
            rotary: returns the result of `rotary_emb` for an offset.
            tokens: description of the tokens for the routers of each depth; None: routers do not count their load.
            cache: cache of the rows in decoding.
            placed: outputs of the tower for placeholder tokens of each depth.
            drafted: `ModelInputs.drafted`.
        """
        tokens = tokens or [None] * self.heads.drafts
        placed = placed or [None] * self.heads.drafts

        def embed(draft: int, *, zeroes_first: bool = False) -> torch.Tensor:
            return self._embed_for_head(mtp_input_ids[draft], position_ids, placed[draft], zeroes_first)

        def ids(draft: int) -> torch.Tensor:
            return self._on_this_sequence_rank(mtp_input_ids[draft].T)

        def embed_token(token: int) -> torch.Tensor:
            token_BS = torch.full_like(mtp_input_ids[0], token)
            return self._embed_for_head(token_BS, position_ids, placed=None, zeroes_first=False)

        layers: Any = self.mtp.layers
        inputs = DraftInputs(
            hidden_SBH, embed, ids, embed_token, rotary, packed_seq_params, tokens, cache, self.drafting, drafted
        )
        # A class method of all layers, because MTP heads are a chain of layers.
        return type(layers[0]).draft(layers, inputs)

    def _embed_for_head(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, placed: Placed | None, zeroes_first: bool
    ) -> torch.Tensor:
        """Look up embeddings [S, B, H] for a head; with `zeroes_first`, zeros at position 0."""
        embeddings_SBH = self._detached(self._embed(input_ids, position_ids, placed))
        if not zeroes_first:
            return embeddings_SBH
        is_first_SB1 = self._on_this_sequence_rank((position_ids == 0).T[..., None])
        return embeddings_SBH.masked_fill(is_first_SB1, 0)

    def _detached(self, embeddings_SBH: torch.Tensor) -> torch.Tensor:
        """Return embeddings for the heads, without gradient if the heads are detached."""
        if not self.detached_heads:
            return embeddings_SBH
        if self.pre_process:
            return embeddings_SBH.detach()
        # Only the heads use this copy of the embedding. Megatron-core's DDP waits for a gradient of every parameter.
        return _ZeroGradient.apply(embeddings_SBH)

    def _on_this_sequence_rank(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor [S, ...] that belongs to this sequence-parallel rank."""
        if not self.config.sequence_parallel:
            return tensor
        tp = self.pg_collection.tp
        # Contiguous parts, as embeddings are scattered (tensor_parallel/mappings.py: `_split_along_first_dim`).
        return tensor.chunk(tp.size())[tp.rank()]

    # Method 4: the output layer and the losses

    def forward_postprocess(
        self,
        states: StageStates,
        target: Target | None = None,
        cu_seqlens: torch.Tensor | None = None,
        main: TokenLoss | None = None,
    ) -> Logits | Losses:
        """Apply the output layer to the states of trunk and heads; return losses if there is a target, else logits.

        Args:
            cu_seqlens: for a packed row, the starts of its padded sequences in the whole row.
            main: the trunk's loss, if it was already computed; None: compute it here.
        """
        if target is None:
            whole_logits = self.output_layers.whole_logits
            mtp_logits = [whole_logits(hidden_SBH, depth) for depth, hidden_SBH in enumerate(states.heads_SBH)]
            return Logits(whole_logits(states.trunk_SBH), mtp_logits)
        labels = target.of_depths(self.heads.drafts, cu_seqlens)
        weights = list(target.weights or [None] * len(labels))
        if main is None:
            with self._frozen():
                main = self.losses.cross_entropy(
                    states.trunk_SBH,
                    labels[0],
                    share_BS=weights[0],
                    with_entropy=target.with_entropy,
                    trains_entropy=target.trains_entropy,
                )
        # The backward pass must still run through the trunk, to which the losses of indexers are attached.
        if self.trains_only_indexers:
            main = replace(main, loss_BS=_NoGradient.apply(main.loss_BS, states.trunk_SBH))
        if self.heads.has_joint_weights:  # they depend on the losses
            weights = [None] * len(labels)
        if self.mtp_loss != "ce":
            return Losses(main, self.losses.distillation(states, labels[1:], weights[1:], cu_seqlens))
        heads = enumerate(zip(states.heads_SBH, labels[1:], weights[1:], strict=True))
        return Losses(
            main,
            [
                self.losses.cross_entropy(hidden_SBH, labels_BS, self.output_layers.of_head(depth), share_BS=share_BS)
                for depth, (hidden_SBH, labels_BS, share_BS) in heads
            ],
        )

    def scores(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Return the score [B, S] of a reward model at each position of the row, the same on all tensor-parallel
        ranks.
        """
        return self.output_layer(self.whole_sequence(hidden_SBH)).squeeze(-1).T

    def whole_sequence(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Gather all positions of the row over sequence-parallel ranks."""
        if not self.config.sequence_parallel:
            return hidden_SBH
        # The output layer sums the gradient over ranks already, so the backward pass only splits it.
        return gather_from_sequence_parallel_region(
            hidden_SBH, tensor_parallel_output_grad=False, group=self.pg_collection.tp
        )

    # Construction

    def setup_embeddings_and_output_layer(self) -> None:
        """Replace the embedding and the output layer by swiftlite's classes.

        The constructor of megatron-core's class calls this method after it has created both layers.
        """
        if self.pre_process or self.mtp_process:
            stock = self.embedding.word_embeddings
            self.embedding.word_embeddings = VocabParallelEmbedding.in_place_of(
                stock, self.config, self.pg_collection.tp
            )
        if self.post_process:
            del self.output_layer  # first, so that only one is in memory
            self.output_layer = self._make_output_layer()
        super().setup_embeddings_and_output_layer()

    def _make_output_layer(self, size_of_own: int = 0) -> ColumnParallelLinear:
        """Return an output layer: that of the trunk, or a head's own one for states of the given size."""
        # Its input is not split: sequences are gathered before positions are selected (`whole_sequence`).
        config = with_settings(self.config, sequence_parallel=False)
        assert config.init_method is not None
        # A tied output layer on the stage of the MTP layers shares the weight of their embedding. megatron-core would
        # allocate a second, unused weight there, and fail when saving it (gpt_model.py:249, language_module.py:341 of
        # 0.16.1).
        has_embedding = self.pre_process or self.mtp_process
        return ColumnParallelLinear(
            size_of_own or config.hidden_size,
            self.vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=not size_of_own and self.share_embeddings_and_output_weights and has_embedding,
            tp_group=self.pg_collection.tp,
        )

    def _find_drafted_rows(self) -> torch.Tensor:
        """Return the indices of the rows of this rank's output matrix whose tokens are in the draft vocabulary, int64
        [V]."""
        group: Any = self.pg_collection.tp
        num_rows = self.vocab_size // group.size()
        # With 8 tokens on 2 ranks, the draft vocabulary 1 5 6 is row 1 on rank 0, and rows 1 and 2 on rank 1.
        row_V = torch.tensor(self.heads.draft_vocab, dtype=torch.int64) - group.rank() * num_rows
        return row_V[(row_V >= 0) & (row_V < num_rows)]

    def train(self, mode: bool = True) -> "GPTModel":
        """Set training or evaluation mode.

        Low precision is used only in training mode: evaluation and decoding compute in the model's precision, like
        engines, with rows of any length.
        """
        for module in self.modules():
            if isinstance(config := getattr(module, "config", None), TransformerConfig):
                for name, value in self._low_precision.items():
                    setattr(config, name, value if mode else None)
        return super().train(mode)


class _ZeroGradient(torch.autograd.Function):
    """Returns a tensor unchanged; the gradient of its input is zeros."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradients[0])


class _NoGradient(torch.autograd.Function):
    """Returns a frozen stage's output unchanged; the gradient of its input is zeros.

    megatron-core's pipeline schedule waits for a gradient from every later stage. Without this function, a frozen stage
    would send no gradient.
    """

    @staticmethod
    def forward(ctx, output: torch.Tensor, stage_input: torch.Tensor) -> torch.Tensor:
        ctx.stage_input = stage_input.shape, stage_input.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        shape, dtype = ctx.stage_input
        return None, gradients[0].new_zeros(shape, dtype=dtype)


def _embedding_multiplier(outside: Outside, dtype: torch.dtype) -> float:
    # Rounded like the buffer of transformers' embedding module: in bfloat16, 50.596 (2560 ** 0.5, Gemma 3 4B) is 50.5.
    if outside.multiplies_in_embedding:
        return torch.tensor(outside.embedding_multiplier, dtype=dtype).item()
    return outside.embedding_multiplier
