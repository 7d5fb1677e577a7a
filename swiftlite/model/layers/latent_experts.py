"""Experts that read and write smaller states than the model's, as in Nemotron 3 Super (`MixtureOfExperts.latent`).

megatron-core's own latent projections require Transformer Engine (moe/moe_layer.py:171 of 0.16.1).
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftlite.model.layers.router import MoELayer


class LatentMoELayer(MoELayer):
    """A mixture of experts between two projections. The router and the shared experts read the model's states.

    Args:
        latent: size of the states of the experts.
        args, kwargs: arguments of megatron-core's class.
    """

    def __init__(self, config: TransformerConfig, *args: Any, latent: int, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.fc1_latent_proj = LatentProjection(config, config.hidden_size, latent)
        self.fc2_latent_proj = LatentProjection(config, latent, config.hidden_size)

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare the projected states for the experts."""
        return super().preprocess(self.fc1_latent_proj(hidden_states), probs, routing_map)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Return the sum [S, B, H] of the projected outputs of routed experts and of the shared experts' output."""
        routed = self.fc2_latent_proj(super().postprocess(output, None))
        return routed if shared_expert_output is None else routed + shared_expert_output


class LatentProjection(nn.Module):
    """A linear layer that all tensor-parallel ranks hold, each for its part of the row."""

    def __init__(self, config: TransformerConfig, size_in: int, size_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map [..., size_in] to [..., size_out]."""
        return F.linear(states, self.weight)
