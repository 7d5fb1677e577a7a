"""The module of an assistant of Gemma 4 (`families/gemma4_assistant.py`).

Shapes: S sequence (of this context- and sequence-parallel rank), B batch, H hidden size of the trunk, A hidden size of
the assistant, F features, N query heads and G key-value heads of a tensor-parallel rank, D size of a head, R rotary
channels. In attention, S is the sequence of all sequence-parallel ranks.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftlite.model.attention.cache import Cache
from swiftlite.model.attention.shared_keys import Read
from swiftlite.model.copied_config import with_settings
from swiftlite.model.drafter import DrafterLayer, DraftInputs
from swiftlite.model.layers.recompute import checkpoint
from swiftlite.model.layers.tensor_parallel import sum_over_sequence_ranks
from swiftlite.model.loss.clusters import TokenClusters


class AssistantLayer(DrafterLayer):
    """The whole assistant, with decoder layers and an output layer of its own.

    Args:
        config: config of the trunk.
        layer_number: 1.
        layers: specs of the decoder layers, whose attention is `ReadingAttention`.
        reads: for each decoder layer, the index of the feature from which its keys and values are computed.
        settings: settings of the decoder layers that replace those of `config`, among them `hidden_size`, A.
        norm: class of the output norm.
        clusters: arguments of `TokenClusters`; empty if all tokens can be drafted.
        trains_state: whether there are later drafts, so that `post_projection` has a gradient.
        options: further arguments of megatron-core's MTP layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        layers: Sequence[ModuleSpec],
        reads: Sequence[int],
        settings: Mapping[str, Any],
        norm: type,
        clusters: Mapping[str, int],
        trains_state: bool,
        **options: Any,
    ):
        hidden = config.hidden_size
        config = with_settings(config, **settings)
        super().__init__(config, layer_number)
        self.reads, self.state_size = reads, config.hidden_size
        self.pre_projection = nn.Linear(2 * hidden, self.state_size, bias=False, dtype=config.params_dtype)
        self.post_projection = nn.Linear(self.state_size, hidden, bias=False, dtype=config.params_dtype)
        self.post_projection.weight.requires_grad_(trains_state)
        for projection in (self.pre_projection, self.post_projection):  # whole on every tensor-parallel rank
            sum_over_sequence_ranks(config, projection.parameters())
        self.build_layers(layers)
        self.final_layernorm = norm(config, self.state_size, config.layernorm_epsilon)
        self.clusters = None
        if clusters:
            self.clusters = TokenClusters(self.state_size, dtype=config.params_dtype, **clusters)
        self._trunk_layers: tuple[Any, ...] = ()

    def connect(self, read_layers: Sequence[Any]) -> None:
        """Set the layers of the trunk whose inputs are features, and whose keys and values are read."""
        self._trunk_layers = tuple(read_layers)  # in a tuple, so that they are not registered as submodules

    @classmethod
    def draft(cls, layers: Sequence[Any], inputs: DraftInputs) -> list[torch.Tensor]:
        """Return the states [S, B, A] of all drafts of the only layer."""
        (layer,) = layers
        hidden = layer.post_projection.out_features
        state_SBH, *features_SBH = inputs.hidden_SBH.split(hidden, dim=-1)
        rotary = inputs.rotary(0)
        forward = partial(
            layer,
            read=layer.read(features_SBH, rotary, inputs.cache),
            rotary=rotary,
            packed_seq_params=inputs.packed_seq_params,
        )
        if layer.config.recompute_granularity == "full" and layer.training:
            forward = partial(checkpoint, layer.config, layer.tp_group, forward)
        drafted_SBA = []
        for draft in range(len(inputs.tokens)):
            drafted_SBA.append(forward(torch.cat((inputs.embed(draft), state_SBH), dim=-1)))
            state_SBH = layer.post_projection(drafted_SBA[-1])
        return drafted_SBA

    @torch.no_grad()
    def read(self, features_SBH: Sequence[torch.Tensor], rotary: torch.Tensor, cache: Cache | None) -> list[Read]:
        """Return what each decoder layer reads: keys and values that the trunk's layers compute from their inputs.

        Args:
            features_SBH: inputs of the trunk's layers, [S, B, H] each.
            rotary: rotary embedding of the positions of the row, [2, S, 1, 1, R].
        """
        reads = []
        for layer, input_SBH in zip(self._trunk_layers, features_SBH, strict=True):
            of_layer = layer.self_attention.get_query_key_value_tensors(layer.input_layernorm(input_SBH), rotary)
            reads.append(Read(of_layer[1], of_layer[2], cache))
        return [reads[index] for index in self.reads]

    def forward(
        self,
        input_SBH: torch.Tensor,
        *,
        read: Sequence[Read],
        rotary: torch.Tensor,
        packed_seq_params: PackedSeqParams | None,
    ) -> torch.Tensor:
        """Return the states [S, B, A] of one draft, after the output norm.

        Args:
            input_SBH: embedding and state, [S, B, 2 * H].
            read, rotary: as in `read`.
        """
        hidden_SBA = self.pre_projection(input_SBH)
        for layer, of_layer in zip(self.decoder_layers, read, strict=True):
            with get_fp8_context(self.config), get_fp4_context(self.config):
                hidden_SBA, _ = layer(
                    hidden_states=hidden_SBA,
                    attention_mask=of_layer,
                    rotary_pos_emb=rotary,
                    packed_seq_params=packed_seq_params,
                )
        return self.final_layernorm(hidden_SBA)
