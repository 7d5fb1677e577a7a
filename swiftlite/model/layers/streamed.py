"""The decoder layers of a frozen trunk that is larger than the memory (`model/trunk.py`)."""

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftlite.model.layers.recompute import TransformerBlock


class StreamedBlock(TransformerBlock):
    """A block without layers, which builds and runs single layers; its user loads and frees them.

    Args:
        spec: the layers that `build_layer` builds, and the final norm, which is part of the block.
        kwargs: further arguments of megatron-core's block.
    """

    holds_layers = False

    def __init__(self, config: TransformerConfig, spec: TransformerBlockSubmodules, **kwargs: Any):
        self.layer_specs = list(spec.layer_specs or [])
        # Experts copy the config deeply, and the schedules later add functions that cannot be copied.
        self._layer_config = copy.copy(config)
        super().__init__(config=config, spec=replace(spec, layer_specs=[]), **kwargs)

    def has_final_layernorm_in_this_stage(self) -> bool:
        """Return True: without pipeline parallelism, the only stage has the final norm."""
        return True

    def build_layer(self, number: int) -> nn.Module:
        """Build decoder layer `number` (from 0) with uninitialized weights."""
        layer = build_module(
            self.layer_specs[number],
            config=self._layer_config,
            layer_number=number + 1,
            pg_collection=self.pg_collection,
            vp_stage=self.vp_stage,
        )
        assert isinstance(layer, nn.Module)
        return layer

    @torch.no_grad()
    def run_layer(
        self,
        layer: nn.Module,
        hidden_SBH: torch.Tensor,
        rotary_emb: torch.Tensor,
        packed_seq_params: PackedSeqParams | None,
    ) -> torch.Tensor:
        """Run one layer, as the block would: from its input to its output, both [S, B, H].

        Args:
            rotary_emb, packed_seq_params: as for `GPTModel.forward_decoder`.
        """
        hidden_SBH, _ = layer(
            hidden_states=hidden_SBH,
            attention_mask=None,
            rotary_pos_emb=rotary_emb,
            packed_seq_params=packed_seq_params,
            padding_mask=None,
        )
        return hidden_SBH
