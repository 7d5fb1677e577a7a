"""The parts of an MTP head with features (`families/mtp_features.py`), which otherwise is an `UnrolledLayer`.

The state of its first step is [trunk's state; features], [S, B, (1 + F) * H]; that of later steps is [S, B, H].

Shapes: S sequence, B batch, H hidden size, F features.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class StateNorms(nn.ModuleList):
    """Normalizes the trunk's state and each feature separately.

    Args:
        norm: class of the norms.
        num_features: F.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, norm: type, num_features: int):
        super().__init__(norm(config, hidden_size, eps) for _ in range(1 + num_features))
        self.hidden_size = hidden_size

    def forward(self, states_SBH: torch.Tensor) -> torch.Tensor:
        """Normalize [S, B, (1 + F) * H], or only a state [S, B, H]."""
        parts_SBH = states_SBH.split(self.hidden_size, dim=-1)
        return torch.cat([norm(part_SBH) for norm, part_SBH in zip(self, parts_SBH, strict=False)], dim=-1)


class FeatureProjection(MegatronModule):
    """Projects [embedding; states] to the input of the decoder layer, in place of megatron-core's `eh_proj`.

    Args:
        input_size: 2 * H, which megatron-core passes.
        linear: class of a column-parallel linear layer.
        num_features: F.
        trains_later: whether there are later steps, so that `later` has a gradient.
        options: further arguments of a linear layer.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        config: TransformerConfig,
        linear: Any,
        num_features: int,
        trains_later: bool,
        **options: Any,
    ):
        super().__init__(config)
        self.hidden_size = hidden_size
        self.embedding = build_module(linear, hidden_size, hidden_size, config=config, **options)
        self.first = build_module(linear, (1 + num_features) * hidden_size, hidden_size, config=config, **options)
        self.later = build_module(linear, hidden_size, hidden_size, config=config, **options)
        self.later.weight.requires_grad_(trains_later)

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The tensor-parallel group."""
        return self.embedding.tp_group

    def forward(self, states_SBH: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return this rank's part of the projection, and no bias, like megatron-core's linear layers.

        Args:
            states_SBH: normalized [embedding; state; features] in the first step, [embedding; state] in later ones.
        """
        embedding_SBH, state_SBH = states_SBH.tensor_split([self.hidden_size], dim=-1)
        is_first = state_SBH.size(-1) == self.first.weight.size(1)
        projected_SBH, _ = (self.first if is_first else self.later)(state_SBH)
        return self.embedding(embedding_SBH)[0] + projected_SBH, None
