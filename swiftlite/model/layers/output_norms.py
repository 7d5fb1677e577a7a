"""A decoder layer with norms also behind attention and MLP."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

_Add = Callable[[tuple[torch.Tensor, None], torch.Tensor, float], torch.Tensor]


class OutputNormsLayer(TransformerLayer):
    """megatron-core's decoder layer, which normalizes the outputs of attention and MLP before it adds them.

    Args:
        norm: class of the norms.
        has_scalar: whether the output is multiplied by a number of the layer, which is not trained.
        args, kwargs: arguments of megatron-core's class.
    """

    def __init__(self, config: TransformerConfig, *args: Any, norm: type, has_scalar: bool = False, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        sizes = config, config.hidden_size, config.layernorm_epsilon
        self.post_attention_layernorm, self.post_mlp_layernorm = norm(*sizes), norm(*sizes)
        # megatron-core calls these functions to add an output to the state.
        self.self_attn_bda = self._add_attention
        self.mlp_bda = self._add_mlp
        scalar = torch.ones(1, dtype=config.params_dtype) if has_scalar else None
        self.register_buffer("layer_scalar", scalar)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Run the layer; return its output [S, B, H] and the context, which is unused."""
        result: tuple[Any, Any] = super().forward(*args, **kwargs)
        hidden_SBH, context = result
        hidden_SBH: Any = self.before_scalar(hidden_SBH, kwargs.get("attention_mask"))
        if self.layer_scalar is not None:
            hidden_SBH = hidden_SBH * self.layer_scalar
        return hidden_SBH, context

    def before_scalar(self, hidden_SBH: torch.Tensor, attention_mask: Any) -> torch.Tensor:
        """Return the state [S, B, H] before it is multiplied by the number of the layer; subclasses add to it.

        Args:
            attention_mask: what the layer gets in place of a mask.
        """
        return hidden_SBH

    def _add_attention(self, training: bool, fused: bool) -> _Add:
        return lambda output, residual, dropout: residual + self.post_attention_layernorm(output[0])

    def _add_mlp(self, training: bool, fused: bool) -> _Add:
        return lambda output, residual, dropout: residual + self.post_mlp_layernorm(output[0])
