"""Experts next to an MLP, as in Gemma 4 (`families/experts_and_mlp.py`).

Shapes: S sequence, B batch, H hidden size, T tokens, E experts.
"""

from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftlite.model.layers.norm import RMSNorm
from swiftlite.model.layers.router import MoELayer, TopKRouter


class NormedRouter(TopKRouter):
    """A router that normalizes its input, and multiplies the weight of each expert by a trained number."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = self.config
        self.input_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        assert config.num_moe_experts is not None
        self.expert_scale = nn.Parameter(torch.ones(config.num_moe_experts, dtype=config.params_dtype))
        self.expert_scale.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return logits [S, B, E] of states [S, B, H]."""
        return super().gating(self.input_norm(input) * self.config.hidden_size**-0.5)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights, in float32 as in transformers, and choice of experts, both [T, E]."""
        score_TE, chosen_TE = super().routing(logits.float(), padding_mask)
        return score_TE / score_TE.sum(dim=-1, keepdim=True) * self.expert_scale, chosen_TE


class ExpertsAndMLP(MoELayer):
    """A mixture of experts and an MLP that read the same states; their normalized outputs are added.

    megatron-core adds shared experts in the same places, but they read the input of the experts.

    Args:
        dense: spec of the MLP.
        norm: class of the norms.
        args, kwargs: arguments of megatron-core's class.
    """

    def __init__(self, config: TransformerConfig, *args: Any, dense: ModuleSpec, norm: type, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        sizes = config, config.hidden_size, config.layernorm_epsilon
        self.dense: Any = build_module(dense, config=config, tp_group=self.attn_tp_group)
        self.dense_norm, self.dense_output_norm = norm(*sizes), norm(*sizes)
        self.experts_norm, self.experts_output_norm = norm(*sizes), norm(*sizes)

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normalized output [S, B, H] of the MLP."""
        return self.dense_output_norm(self.dense(self.dense_norm(hidden_states))[0])

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare states for the experts, which, unlike the router, read them through a norm."""
        return super().preprocess(self.experts_norm(hidden_states), probs, routing_map)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Return the sum [S, B, H] of both outputs."""
        routed = self.experts_output_norm(super().postprocess(output, None))
        return routed if shared_expert_output is None else shared_expert_output + routed
