"""The MTP layer: depth k (from 1) sees, at position s, the trunk's state there and the tokens s+1 .. s+k, and predicts
token s+k+1.

Rotary positions are the trunk's (s, not s+k), as the engines use them when they draft.

Shapes: S sequence, B batch, H hidden size.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer as McoreMultiTokenPredictionLayer

from swiftlite.model.recompute import checkpoint
from swiftlite.runtime.compat import MTP_INNER_LAYER


class MultiTokenPredictionLayer(McoreMultiTokenPredictionLayer):
    """megatron-core's layer, given the token ids of its own depth.

    The stock layer shifts the ids itself, through `roll_tensor`, which across context-parallel ranks sends one message
    per packed sequence; here the whole row is shifted before it is cut (`data/batch.py`).
    """

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding,
        hidden_states: torch.Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        **padding_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """The ids [B, S] as they came, and their embeddings [S, B, H].

        Args:
            padding_mask: handed in, and wanted back in the third place, since megatron-core 0.17.
        """
        decoder_input = embedding(input_ids=input_ids, position_ids=position_ids)
        return input_ids, position_ids, *padding_mask.values(), decoder_input, hidden_states

    def _proj_and_transformer_layer(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What is computed again: the projection, the decoder layer and the output norm, in their precision.

        The stock method enters the FP8 context itself and leaves out FP4; both are entered anew each time.
        """
        # A node of its own: what this layer sends back is summed before it meets the gradient of the output layer, as
        # when it is recomputed. Otherwise the last bit would tell (a + b) + c from a + (b + c).
        hidden_states = hidden_states.view_as(hidden_states)
        with get_fp4_context(self.config):
            return super()._proj_and_transformer_layer(hidden_states, *args, **kwargs)

    def _checkpointed_forward(
        self,
        *_method: Callable[..., torch.Tensor],  # the one below, named by megatron-core up to 0.17
        hidden_states: torch.Tensor,
        decoder_input: torch.Tensor,
        **closure: Any,
    ) -> torch.Tensor:
        """`_proj_and_transformer_layer` of all the arguments, keeping the two that carry gradients.

        With `recompute_granularity` full an MTP layer is recomputed whatever the method and `recompute_num_layers`:
        those say how decoder layers share checkpoints, and this one layer has its inputs from two sides. The stock
        method refuses `uniform` with more than 1, does nothing with `block`, and hands descriptors of packed rows to
        autograd, which takes only tensors.
        """

        def forward(hidden_states: torch.Tensor, decoder_input: torch.Tensor) -> torch.Tensor:
            return self._proj_and_transformer_layer(hidden_states=hidden_states, decoder_input=decoder_input, **closure)

        return self._checkpoint(forward, hidden_states, decoder_input)

    def _checkpoint(self, forward: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        # Delayed scaling updates its factors on leaving the outermost context, which must be once per call.
        is_delayed = self.config.fp8 and self.config.fp8_recipe == Fp8Recipe.delayed
        with get_fp8_context(self.config) if is_delayed else nullcontext():
            return checkpoint(self.config, forward, *tensors)


class UnrolledLayer(MultiTokenPredictionLayer):
    """A head that drafts several tokens, computed as engines do: step j (from 1) from position s stands at s + j - 1,
    and sees what `DraftAttention` says."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Later steps read the keys of the first: neither they nor what made them may be computed anew in between.
        self._attention.checkpoint_core_attention = False
        self._attention.recompute_up_proj = False

    @property
    def _attention(self) -> Any:
        return getattr(self, MTP_INNER_LAYER).self_attention

    def _postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing: the norm is left to `forward_steps`, since not every engine recycles what it makes."""
        return hidden_states

    def forward_steps(
        self,
        hidden_SBH: torch.Tensor,
        decoder_inputs_SBH: Sequence[torch.Tensor],
        rotary_pos_embs: Sequence[torch.Tensor | None],
        packed_seq_params: PackedSeqParams | None,
        *,
        recycles_before_norm: bool,
    ) -> list[torch.Tensor]:
        """States [S, B, H] of each step, after the output norm.

        Args:
            hidden_SBH: the trunk's.
            decoder_inputs_SBH: of each step, embeddings of the tokens j places further on.
            rotary_pos_embs: of each step, angles from position j - 1 on; None with latent attention.
        """

        def forward(hidden_SBH: torch.Tensor, *decoder_inputs_SBH: torch.Tensor) -> torch.Tensor:
            states = []
            with self._attention.core_attention.drafting():
                for step, inputs in enumerate(zip(decoder_inputs_SBH, rotary_pos_embs, strict=True)):
                    self._attention.rotary_offset = step
                    before = self._proj_and_transformer_layer(
                        hidden_states=hidden_SBH,
                        decoder_input=inputs[0],
                        rotary_pos_emb=inputs[1],
                        packed_seq_params=packed_seq_params,
                    )
                    states.append(super(UnrolledLayer, self)._postprocess(before))
                    hidden_SBH = before if recycles_before_norm else states[-1]
            return torch.cat(states)  # a checkpoint returns one tensor

        # All steps share one checkpoint, because they share keys.
        is_recomputed = self.config.recompute_granularity == "full" and self.training
        run = partial(self._checkpoint, forward) if is_recomputed else forward
        return list(run(hidden_SBH, *decoder_inputs_SBH).chunk(len(decoder_inputs_SBH)))
