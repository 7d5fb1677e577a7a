"""A decoder layer whose norms also compute the residual connections.

Separate kernels for the addition of attention's output, and for the sums of the two gradients of each state, would read
and write the states again.

Shapes: S sequence, B batch, H hidden size.
"""

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer

from swiftlite.model.layers.compiled import compiled
from swiftlite.model.layers.norm import FusedRMSNorm

Pair = tuple[torch.Tensor, torch.Tensor]


class ResidualRMSNorm(FusedRMSNorm):
    """A norm that also returns its input, so that one kernel sums the gradients of both uses of this input."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: torch.Tensor, added: torch.Tensor | None = None
    ) -> Pair:
        """Return the states before and after the norm, both [..., hidden_size].

        Args:
            added: is added to the states before the norm. The norm reads the sum before it is rounded.
        """
        states: Any = _Norm.apply(hidden, added, self.weight, self.eps, self.is_zero_centered)
        return states


class ResidualLayer(TransformerLayer):
    """megatron-core's decoder layer, which uses residual connections in its norms if these are `ResidualRMSNorm`."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Run the layer; return its output [S, B, H] and the context, which is unused."""
        if isinstance(self.input_layernorm, ResidualRMSNorm):
            return self._forward_fused(hidden_states, *args, **kwargs), None
        result: tuple[Any, Any] = super().forward(hidden_states, *args, **kwargs)
        return result

    def _forward_fused(
        self,
        hidden_SBH: torch.Tensor,
        attention_mask: Any = None,  # as for CoreAttention
        *,
        padding_mask: Any = None,
        context: None = None,
        context_mask: None = None,
        **of_attention: Any,
    ) -> torch.Tensor:
        """Compute megatron-core's `forward` without cross attention and dropout.

        Args:
            padding_mask: as for the MLP.
            of_attention: further arguments of attention.
        """
        hidden_SBH, normed_SBH = self.input_layernorm(hidden_SBH)
        output_SBH, bias = self.self_attention(normed_SBH, attention_mask, **of_attention)
        if bias is not None:
            output_SBH = output_SBH + bias
        # The norm adds attention's output to the state, in the same kernel.
        hidden_SBH, normed_SBH = self.pre_mlp_layernorm(hidden_SBH, output_SBH)
        mlp = partial(self.mlp, padding_mask=padding_mask)
        if self.recompute_mlp:
            mlp = partial(tensor_parallel.checkpoint, mlp, False)
        return self.mlp_bda(self.training, self.config.bias_dropout_fusion)(
            mlp(normed_SBH), hidden_SBH, self.hidden_dropout
        )


class _Norm(torch.autograd.Function):
    """The sum of two states, and its RMSNorm. It stores the sum."""

    @staticmethod
    def forward(
        ctx, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float, is_zero_centered: bool
    ) -> Pair:
        if added is None:
            normed = fused_norm(hidden, weight, eps, is_zero_centered)
        else:
            hidden, normed = fused_add_and_norm(hidden, added, weight, eps, is_zero_centered)
        ctx.save_for_backward(hidden, weight)
        ctx.settings = eps, is_zero_centered
        return hidden, normed

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight = ctx.saved_tensors
        (grad_hidden, grad_normed), (eps, is_zero_centered) = grad_outputs, ctx.settings
        of_both, of_weight = fused_norm_backward(
            grad_hidden, grad_normed, hidden, weight, eps, is_zero_centered, ctx.needs_input_grad[2]
        )
        # Both terms of the sum have its gradient.
        return of_both, of_both if ctx.needs_input_grad[1] else None, of_weight, None, None


def norm(hidden: torch.Tensor, weight_H: torch.Tensor, eps: float, is_zero_centered: bool) -> torch.Tensor:
    """Compute the RMSNorm of [..., H] in float32; rounded once.

    Args:
        is_zero_centered: whether the norm multiplies by 1 + weight.
    """
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * _factor(weight_H, is_zero_centered)).to(hidden.dtype)


def _factor(weight_H: torch.Tensor, is_zero_centered: bool) -> torch.Tensor:
    factor_H = weight_H.float()
    return 1.0 + factor_H if is_zero_centered else factor_H


def add_and_norm(
    hidden: torch.Tensor, added: torch.Tensor, weight_H: torch.Tensor, eps: float, is_zero_centered: bool
) -> Pair:
    """Return the sum of two states [..., H], and its norm."""
    total = hidden + added
    return total, norm(total, weight_H, eps, is_zero_centered)


def norm_backward(
    grad_hidden: torch.Tensor,
    grad_normed: torch.Tensor,
    hidden: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    is_zero_centered: bool,
    learns_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of the norm's input [..., H], which has another use, and of its weight, all in float32.

    Args:
        grad_hidden: gradient of the input's other use.
        learns_weight: whether the weight has a gradient.
    """
    wide, upstream = hidden.float(), grad_normed.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * scale
    of_unit = upstream * _factor(weight_H, is_zero_centered)
    # The norm does not depend on the length of its input, so the part of the gradient along the input drops out.
    of_input = scale * (of_unit - unit * (of_unit * unit).mean(-1, keepdim=True))
    of_both = (grad_hidden.float() + of_input).to(hidden.dtype)
    if not learns_weight:
        return of_both, None
    return of_both, (upstream * unit).flatten(0, -2).sum(0).to(weight_H.dtype)


fused_norm = compiled(norm, static=(1, 1))
fused_add_and_norm = compiled(add_and_norm, static=(1, 1, 1))
fused_norm_backward = compiled(norm_backward, static=(1, 1, 1, 1))
