"""The layers of MTP heads, one per depth.

At position s, depth k (from 1) reads the state of depth k - 1 at s (depth 1: the trunk's state) and the embedding of
token s + k, and predicts token s + k + 1.

For example, take the position of "cat" in the row "the cat sat on mats". Depth 1 reads the trunk's state, which depends
on "the cat", and the embedding of "sat", and predicts "on". Depth 2 reads the state of depth 1 and the embedding of
"on", and predicts "mats".

Rotary positions are the trunk's (s, not s + k), as in engines when they draft.

Shapes: S sequence, B batch, H hidden size.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.enums import Fp8Recipe
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as McoreMultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.model.attention.cache import Cache
from swiftlite.model.attention.draft_attention import Draft
from swiftlite.model.attention.sparse import in_place_of_mask
from swiftlite.model.copied_config import with_settings
from swiftlite.model.drafter import DraftInputs
from swiftlite.model.layers.norm import SharedNorm
from swiftlite.model.layers.recompute import checkpoint
from swiftlite.model.loss.balance import RoutedTokens
from swiftlite.runtime.compat import MTP_INNER_LAYER


class MultiTokenPredictionLayer(McoreMultiTokenPredictionLayer):
    """megatron-core's MTP layer with the embeddings of its depth as input.

    megatron-core's layer shifts token ids with `roll_tensor`, which with context parallelism sends one message per
    packed sequence. Here the whole row is shifted before it is split (`data/batch.py`).
    """

    @classmethod
    def draft(cls, layers: Sequence[Any], inputs: DraftInputs) -> list[torch.Tensor]:
        """Return the states [S, B, H] of each depth after its output norm; depth k + 1 continues from depth k."""
        hidden_SBH, states_SBH = inputs.hidden_SBH, []
        rotary_emb = inputs.rotary(0)
        blocks = [getattr(layer, MTP_INNER_LAYER) for layer in layers]
        for depth, (layer, tokens) in enumerate(zip(layers, inputs.tokens, strict=True)):
            hidden_SBH = layer(
                hidden_SBH,
                inputs.embed(depth, zeroes_first=inputs.drafting.zeroes_first_embedding),
                attention_mask=in_place_of_mask(blocks, inputs.cache, tokens),  # see `GPTModel.forward_decoder`
                rotary_pos_emb=rotary_emb,
                packed_seq_params=inputs.packed_seq_params,
                padding_mask=tokens,
            )
            after_norm_SBH = hidden_SBH
            if inputs.drafting.chains_before_norm:
                hidden_SBH, after_norm_SBH = hidden_SBH.chunk(2)  # of `norm_returning_input`
            states_SBH.append(after_norm_SBH)
        return states_SBH

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: torch.Tensor, decoder_input: torch.Tensor, **closure: Any
    ) -> torch.Tensor:
        """Return the state [S, B, H] of this depth, after the output norm.

        Args:
            hidden_states: states of the previous depth, or of the trunk.
            decoder_input: embeddings of the tokens that this depth reads.
            closure: further arguments of the decoder layer.
        """
        if self.config.recompute_granularity == "full" and self.training:
            return self._checkpointed_forward(hidden_states, decoder_input, **closure)
        return self._proj_and_transformer_layer(hidden_states, decoder_input, **closure)

    def _proj_and_transformer_layer(
        self,
        hidden_states: torch.Tensor,
        decoder_input: torch.Tensor,
        padding_mask: RoutedTokens | None = None,
        **closure: Any,
    ) -> torch.Tensor:
        """Run the part that can be recomputed: projection, decoder layer and output norm. It runs in FP8 or FP4 if
        configured.

        megatron-core's method enters only the FP8 context; this one also enters the FP4 context. Up to 0.16,
        megatron-core's method also does not pass the padding mask to the decoder layer.
        """

        def with_padding_mask(_: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            return args, kwargs | {"padding_mask": padding_mask}

        # A separate autograd node: this layer's gradients are summed before the gradient of the output layer is added,
        # as with recomputation. Otherwise the order of the sum, (a + b) + c or a + (b + c), could change the last bit.
        hidden_states = hidden_states.view_as(hidden_states)
        decoder_layer = getattr(self, MTP_INNER_LAYER)
        with (
            get_fp4_context(self.config),
            decoder_layer.register_forward_pre_hook(with_padding_mask, with_kwargs=True),
        ):
            return super()._proj_and_transformer_layer(hidden_states, decoder_input, **closure)

    def _checkpointed_forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: torch.Tensor, decoder_input: torch.Tensor, **closure: Any
    ) -> torch.Tensor:
        """Run `_proj_and_transformer_layer`, storing only the two arguments with gradients.

        If `recompute_granularity` is full, an MTP layer is always recomputed; `recompute_method` and
        `recompute_num_layers` apply only to decoder layers. megatron-core's function of this name does not support
        `uniform` with more than 1 layer and does nothing with `block`. It also passes descriptors of packed rows to
        autograd, which accepts only tensors.
        """

        def forward(hidden_states: torch.Tensor, decoder_input: torch.Tensor) -> torch.Tensor:
            return self._proj_and_transformer_layer(hidden_states, decoder_input, **closure)

        return self._checkpoint(forward, hidden_states, decoder_input)

    def _checkpoint(self, forward: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        # Delayed scaling updates its factors when the outermost context exits, which must happen once per call.
        context: AbstractContextManager = nullcontext()
        if self.config.fp8 and self.config.fp8_recipe == Fp8Recipe.delayed:
            context = get_fp8_context(self.config)
        # The weight of a shared norm is an argument, so that its gradients are summed as without recomputation.
        norm = self.final_layernorm
        if isinstance(norm, SharedNorm):
            forward = partial(norm.with_weight, forward)
            tensors = (norm.weight_H, *tensors)
        with context:
            return checkpoint(self.config, self._tp_group, forward, *tensors)

    @property
    def _tp_group(self) -> dist.ProcessGroup:
        return self.eh_proj.tp_group


class UnrolledLayer(MultiTokenPredictionLayer):
    """A head that drafts several tokens like an engine.

    Step j (from 1) of the draft from position s is computed at position s + j - 1. The head's attention is
    `DraftAttention`. Example: three steps from position s, where t are the row's tokens:

        step 1   trunk's state, t[s + 1]   at position s        predicts t[s + 2]
        step 2   state of step 1, t[s + 2] at position s + 1    predicts t[s + 3]
        step 3   state of step 2, t[s + 3] at position s + 2    predicts t[s + 4]
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        # Later steps read the keys of the first step, so single layers must not be recomputed in between.
        kept = [module for module in config.recompute_modules or () if module not in ("core_attn", "mla_up_proj")]
        super().__init__(with_settings(config, recompute_modules=kept), *args, **kwargs)

    @classmethod
    def draft(cls, layers: Sequence[Any], inputs: DraftInputs) -> list[torch.Tensor]:
        """Return the states [S, B, H] of each step of the only layer."""
        (layer,) = layers
        # From position 0, step j is at position j - 1.
        embeddings_SBH = [inputs.embed(0, zeroes_first=inputs.drafting.zeroes_first_embedding)]
        embeddings_SBH += [inputs.embed(step) for step in range(1, len(inputs.tokens))]
        return layer.forward_steps(
            inputs.hidden_SBH,
            embeddings_SBH,
            [inputs.rotary(step) for step in range(len(inputs.tokens))],
            inputs.packed_seq_params,
            inputs.tokens,
            cache=inputs.cache,
            recycles_before_norm=inputs.drafting.recycles_before_norm,
        )

    def _postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Do nothing, because `forward_steps` applies the output norm. Some engines use the state before this norm for
        the next step.
        """
        return hidden_states

    def forward_steps(
        self,
        hidden_SBH: torch.Tensor,
        decoder_inputs_SBH: Sequence[torch.Tensor],
        rotary_pos_embs: Sequence[torch.Tensor],
        packed_seq_params: PackedSeqParams | None,
        tokens: Sequence[RoutedTokens | None],
        *,
        cache: Cache | None,
        recycles_before_norm: bool,
    ) -> list[torch.Tensor]:
        """Return the states [S, B, H] of each step, after the output norm.

        Args:
            hidden_SBH: states of the trunk.
            decoder_inputs_SBH: for each step j, embeddings of the tokens j positions later.
            rotary_pos_embs: for each step j, rotary embeddings of the row's positions plus j - 1.
            tokens: the routers' tokens of each step.
            cache: in decoding, the KV cache of the rows; None in training.
            recycles_before_norm: whether a step reads the previous step's state before the output norm; otherwise it
                reads the state after the norm.
        """
        steps = partial(
            self._steps,
            rotary_pos_embs=rotary_pos_embs,
            packed_seq_params=packed_seq_params,
            tokens=tokens,
            cache=cache,
            recycles_before_norm=recycles_before_norm,
        )
        # All steps share one checkpoint, because they share keys.
        run: Callable[..., torch.Tensor] = steps
        if self.config.recompute_granularity == "full" and self.training:
            run = partial(self._checkpoint, steps)
        return list(run(hidden_SBH, *decoder_inputs_SBH).chunk(len(decoder_inputs_SBH)))

    def _steps(
        self,
        hidden_SBH: torch.Tensor,
        *decoder_inputs_SBH: torch.Tensor,
        rotary_pos_embs: Sequence[torch.Tensor],
        packed_seq_params: PackedSeqParams | None,
        tokens: Sequence[RoutedTokens | None],
        cache: Cache | None,
        recycles_before_norm: bool,
    ) -> torch.Tensor:
        """Return the states of `forward_steps` as one tensor, because a checkpointed function must return a single
        tensor.
        """
        draft = Draft(cache)
        states_SBH = []
        steps = zip(decoder_inputs_SBH, rotary_pos_embs, tokens, strict=True)
        for decoder_input_SBH, rotary_pos_emb, tokens_of_step in steps:
            before_norm_SBH = self._proj_and_transformer_layer(
                hidden_states=hidden_SBH,
                decoder_input=decoder_input_SBH,
                attention_mask=draft,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                padding_mask=tokens_of_step,
            )
            # The output layer reads this one; which of the two the next step reads depends on the engine.
            after_norm_SBH = super()._postprocess(before_norm_SBH)
            states_SBH.append(after_norm_SBH)
            hidden_SBH = after_norm_SBH
            if recycles_before_norm:
                hidden_SBH = before_norm_SBH
        return torch.cat(states_SBH)
