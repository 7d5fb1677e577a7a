"""RMSNorm in the order of operations that transformers uses, so that results agree bit for bit."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftlite.model.layers.compiled import compiled
from swiftlite.model.stage_states import StageStates


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32.

    The stock WrappedTorchNorm refuses sequence parallelism, and multiplies by the weight before rounding to the
    input's precision, where transformers rounds first.

    With `layernorm_zero_centered_gamma` the weight is what is added to 1; of such models transformers rounds last.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # megatron-core sums the gradients of such parameters over tensor-parallel ranks (finalize_model_grads.py).
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden_size]; the result has the input's dtype."""
        if self.is_zero_centered:
            return zero_centered_norm(hidden, self.weight, self.eps)
        hidden_fp32 = hidden.float()
        variance = hidden_fp32.pow(2).mean(-1, keepdim=True)
        normed = hidden_fp32 * torch.rsqrt(variance + self.eps)
        return self.weight * normed.to(hidden.dtype)


class FusedRMSNorm(RMSNorm):
    """Compute the same norm in one kernel each way, which saves only its input for the backward pass.

    The kernel is torch's own. It multiplies by the weight before it rounds: in bfloat16 one rounding off from
    transformers. It takes weights of the input's precision alone, so a zero-centered weight has a compiled function:
    of 1 + w in bfloat16 only the first 2^-8 of w is left.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden_size]; the result has the input's dtype."""
        if self.is_zero_centered:
            return fused_zero_centered_norm(hidden, self.weight, self.eps)
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def zero_centered_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize [..., hidden_size] and multiply by 1 + weight, all in float32; rounded once, to the input's dtype."""
    hidden_fp32 = hidden.float()
    variance = hidden_fp32.pow(2).mean(-1, keepdim=True)
    normed = hidden_fp32 * torch.rsqrt(variance + eps)
    return (normed * (1.0 + weight.float())).to(hidden.dtype)


fused_zero_centered_norm = compiled(zero_centered_norm)


@cache
def returning_input(norm: Any) -> type:
    """Make the trunk's final norm where MTP heads read the state before it.

    Its output is both states in wire form [2S, B, H], so that a pipeline sends both to the stage of the heads.
    """

    def forward(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return StageStates(norm.forward(self, hidden), prenorm_SBH=hidden).to_wire()

    return type(f"Keeping{norm.__name__}", (norm,), {"forward": forward})
