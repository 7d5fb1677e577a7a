"""RMSNorm in the order of operations that transformers uses, so that results are bitwise identical."""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftlite.model.layers.compiled import compiled
from swiftlite.model.stage_states import StageStates


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32.

    megatron-core's WrappedTorchNorm does not support sequence parallelism, and multiplies by the weight before rounding
    to the input's precision, while transformers rounds first.

    With `layernorm_zero_centered_gamma`, the output is multiplied by 1 + weight, and rounded afterwards as in
    transformers.
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


class LastRoundedRMSNorm(RMSNorm):
    """Root-mean-square norm that multiplies by the weight before it rounds."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden_size]; the result has the input's dtype."""
        hidden_fp32 = hidden.float()
        variance = hidden_fp32.pow(2).mean(-1, keepdim=True)
        return (self.weight * (hidden_fp32 * torch.rsqrt(variance + self.eps))).to(hidden.dtype)


class FusedRMSNorm(RMSNorm):
    """RMSNorm with one kernel for the forward and one for the backward pass. It stores only its input.

    torch's kernel multiplies by the weight before it rounds, so in bfloat16 results differ from transformers by one
    rounding. The kernel requires weights in the input's precision. Zero-centered weights use a compiled function
    instead, because 1 + w in bfloat16 would round w to multiples of 2^-7.
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden_size]; the result has the input's dtype."""
        if self.is_zero_centered:
            return fused_zero_centered_norm(hidden, self.weight, self.eps)
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class DeferredRMSNorm(FusedRMSNorm):
    """The norm of queries or keys that is computed by the kernel of their rotary embedding (`rope.norm_and_rotate`)."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return hidden


class SharedNorm(nn.Module):
    """The output norm of MTP heads that use the trunk's final norm. It has no weight.

    Args:
        norm: class of the norm, one of those above.

    Attributes:
        of: the norm of the trunk, in a tuple, so that it is not a submodule of the head.
        is_detached: whether the norm's weight gets no gradient from the heads.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, norm: type[RMSNorm]):
        super().__init__()
        self.norm = norm
        self.of: tuple[RMSNorm, ...] = ()
        self.is_detached = False
        self._given: tuple[torch.Tensor, ...] = ()  # in a tuple for the same reason

    @property
    def weight_H(self) -> torch.Tensor:
        """The weight of the trunk's norm."""
        if self._given:
            return self._given[0]
        (shared,) = self.of
        return shared.weight.detach() if self.is_detached else shared.weight

    def with_weight(
        self, function: Callable[..., torch.Tensor], weight_H: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """Call the function while `forward` multiplies by the given weight.

        A recomputed function gets the weight as an argument, so that gradients of all uses of the weight are summed in
        the same order as without recomputation.
        """
        self._given = (weight_H,)
        try:
            return function(*tensors)
        finally:
            self._given = ()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden_size]; the result has the input's dtype."""
        (shared,) = self.of
        # The class of the trunk's norm can have another output, see `returning_input`.
        values: Any = SimpleNamespace(weight=self.weight_H, eps=shared.eps, is_zero_centered=shared.is_zero_centered)
        return self.norm.forward(values, hidden)


def zero_centered_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize [..., hidden_size] and multiply by 1 + weight, all in float32; rounded once, to the input's dtype."""
    hidden_fp32 = hidden.float()
    variance = hidden_fp32.pow(2).mean(-1, keepdim=True)
    normed = hidden_fp32 * torch.rsqrt(variance + eps)
    return (normed * (1.0 + weight.float())).to(hidden.dtype)


fused_zero_centered_norm = compiled(zero_centered_norm, static=(1, 1))


@cache
def returning_input(norm: Any) -> type:
    """Return a class for the trunk's final norm, for MTP heads that read the state before this norm.

    Its output is the states before and after the norm, concatenated [2S, B, H], so that a pipeline sends both to the
    stage of the heads.
    """

    def forward(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return StageStates(norm.forward(self, hidden), prenorm_SBH=hidden).to_wire()

    return type(f"Keeping{norm.__name__}", (norm,), {"forward": forward})
