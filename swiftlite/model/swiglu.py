"""The activation of a gated MLP."""

from typing import Any

import torch
import torch.nn.functional as F


class SwiGLU:
    """silu(gate) * up, of gate and up side by side.

    megatron-core's own adds an offset to up, which other models have and is 0 here: one more pass over it, and one more
    tensor kept for the backward pass (transformer/mlp.py:225 of 0.16.1).
    """

    def __init__(self, config: Any):
        """As megatron-core makes what a spec names; there is nothing to configure."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., ffn] of [..., 2 * ffn]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
