"""The MTP layer: depth k (from 1) sees, at position s, the trunk's state there and the tokens s+1 .. s+k, and predicts
token s+k+1.

For example, in the row "the cat sat on mats", at the position of "cat": depth 1 sees the trunk's state, which has read
"the cat", and the embedding of "sat", and predicts "on". Depth 2 sees the state of depth 1 and the embedding of "on",
and predicts "mats".

Rotary positions are the trunk's (s, not s+k), as the engines use them when they draft.

Shapes: S sequence, B batch, H hidden size.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as McoreMultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.model.attention.cache import Cache
from swiftlite.model.attention.draft_attention import Draft
from swiftlite.model.layers.recompute import checkpoint
from swiftlite.model.loss.balance import RoutedTokens
from swiftlite.runtime.compat import MTP_INNER_LAYER


class MultiTokenPredictionLayer(McoreMultiTokenPredictionLayer):
    """megatron-core's MTP layer with the embeddings of its depth as input.

    The stock layer shifts token ids with `roll_tensor`, which across context-parallel ranks sends one message per
    packed sequence. Here the whole row is shifted before it is split (`data/batch.py`)."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: torch.Tensor, decoder_input: torch.Tensor, **closure: Any
    ) -> torch.Tensor:
        """Return the state [S, B, H] of this depth, after the output norm.

        Args:
            hidden_states: of the depth before.
            decoder_input: embeddings of the tokens that this depth sees.
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
        """Compute the recomputed part: the projection, the decoder layer and the output norm, in their precision.

        The stock method enters the FP8 context and not that of FP4; here both are entered each time. Up to 0.16 it does
        not pass the padding mask to the decoder layer."""

        def with_padding_mask(_: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            return args, kwargs | {"padding_mask": padding_mask}

        # A separate node: this layer's gradients are summed before the gradient of the output layer is added, as
        # when it is recomputed. Otherwise the last bit would tell (a + b) + c from a + (b + c).
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
        """Run `_proj_and_transformer_layer` of all the arguments, keeping the two that carry gradients.

        With `recompute_granularity` full an MTP layer is recomputed whatever the method and `recompute_num_layers`:
        those say how decoder layers share checkpoints, and this one layer has its inputs from two sides. The stock
        method refuses `uniform` with more than 1, does nothing with `block`, and hands descriptors of packed rows to
        autograd, which takes only tensors.
        """

        def forward(hidden_states: torch.Tensor, decoder_input: torch.Tensor) -> torch.Tensor:
            return self._proj_and_transformer_layer(hidden_states, decoder_input, **closure)

        return self._checkpoint(forward, hidden_states, decoder_input)

    def _checkpoint(self, forward: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        # Delayed scaling updates its factors on leaving the outermost context, which must be once per call.
        context: AbstractContextManager = nullcontext()
        if self.config.fp8 and self.config.fp8_recipe == Fp8Recipe.delayed:
            context = get_fp8_context(self.config)
        with context:
            return checkpoint(self.config, self.eh_proj.tp_group, forward, *tensors)


class UnrolledLayer(MultiTokenPredictionLayer):
    """A head that drafts several tokens as engines do: step j (from 1) of position s is at position s + j - 1, with the
    attention of `DraftAttention`.

    Example: three steps computed from position s (t are the row's tokens):

        step 1   trunk's state, t[s + 1]   at position s        predicts t[s + 2]
        step 2   state of step 1, t[s + 2] at position s + 1    predicts t[s + 3]
        step 3   state of step 2, t[s + 3] at position s + 2    predicts t[s + 4]
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        # Later steps read the keys of the first step, so these must not be recomputed in between.
        kept = [module for module in config.recompute_modules or () if module not in ("core_attn", "mla_up_proj")]
        config = copy.copy(config)
        config.recompute_modules = kept
        super().__init__(config, *args, **kwargs)

    def _postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Do nothing: `forward_steps` applies the norm, because not every engine recycles its output."""
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
            rotary_pos_embs: for each step j, rotary embeddings from position j - 1 on.
            tokens: the router targets of each step.
            cache: cache of whole rows, as for `GPTModel.forward`.
            recycles_before_norm: whether a step continues from the state before the output norm instead of after it.
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
        """Return the states of `forward_steps`, one after the other: a checkpoint returns one tensor."""
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
            after_norm_SBH = super()._postprocess(before_norm_SBH)
            states_SBH.append(after_norm_SBH)
            hidden_SBH = after_norm_SBH
            if recycles_before_norm:
                hidden_SBH = before_norm_SBH
        return torch.cat(states_SBH)
