"""A norm of the queries or keys of all heads together."""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn


class JointRMSNorm(nn.Module):
    """Root-mean-square norm over the channels of all heads, computed in float32 and rounded last.

    Tensor-parallel ranks split the heads: each rank has the weights of its heads, and the sum of squares is over all
    ranks.

    Args:
        hidden_size: size of a head.
        heads: number of heads over all ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, heads: int, eps: float):
        super().__init__()
        self.eps = eps
        self.num_channels = heads * hidden_size
        self.is_split = config.tensor_model_parallel_size > 1
        own = torch.ones(self.num_channels // config.tensor_model_parallel_size, dtype=config.params_dtype)
        self.weight = nn.Parameter(own)
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, heads_SBND: torch.Tensor) -> torch.Tensor:
        """Normalize the heads [S, B, N, D] of this rank; the result has the input's dtype."""
        channels = heads_SBND.flatten(2).float()
        squares = channels.pow(2)
        if self.is_split:
            # Each rank's result depends on the sum, so both passes sum over ranks.
            total = reduce_from_tensor_model_parallel_region(squares.sum(-1, keepdim=True))
            variance = copy_to_tensor_model_parallel_region(total) / self.num_channels
        else:
            variance = squares.mean(-1, keepdim=True)
        normed = self.weight * (channels * torch.rsqrt(variance + self.eps))
        return normed.to(heads_SBND.dtype).view_as(heads_SBND)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the part of the weight that this rank writes to a checkpoint."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)
