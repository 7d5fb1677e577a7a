"""RMSNorm in the order of operations that transformers uses, so that results agree bit for bit."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


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
        """Normalise [..., hidden_size]; the result has the input's dtype."""
        hidden_fp32 = hidden.float()
        variance = hidden_fp32.pow(2).mean(-1, keepdim=True)
        normed = hidden_fp32 * torch.rsqrt(variance + self.eps)
        if self.is_zero_centered:
            return (normed * (1.0 + self.weight.float())).to(hidden.dtype)
        return self.weight * normed.to(hidden.dtype)


class FusedRMSNorm(RMSNorm):
    """The same parameters in torch's own operation, which on CUDA is one kernel each way, and keeps its input alone.

    It multiplies by the weight before it rounds: in bfloat16 one rounding off from transformers.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise [..., hidden_size]; the result has the input's dtype."""
        weight = 1.0 + self.weight if self.is_zero_centered else self.weight
        return F.rms_norm(hidden, weight.shape, weight, self.eps)


@cache
def keeping(norm: Any) -> type:
    """The norm behind the trunk where MTP heads take the state before it: a subclass that gives its input and its
    output [2S, B, H], one after the other, so that a pipeline sends both to the stage of the heads."""

    def forward(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat((hidden, norm.forward(self, hidden)))

    return type(f"Keeping{norm.__name__}", (norm,), {"forward": forward})
