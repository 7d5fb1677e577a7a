"""Linear layers whose products torch computes in FP8 (`torch._scaled_mm`), without Transformer Engine.

The forward pass and the gradients of inputs are computed in FP8, and the gradients of weights in bfloat16 from
unquantized tensors, because their errors would add up in the weights. Nothing but the products changes: parameters,
saved inputs and `main_grad` are those of the layers in bfloat16. In evaluation mode, the layers compute in bfloat16.

A product sums over the last axis of both factors, `left_MK @ right_NK.T`. With the recipe `rowwise` each row has a
scale, so a row does not depend on other rows, and with `tensorwise` each factor has one.
"""

from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from swiftlite.model.layers.compiled import compiled
from swiftlite.model.layers.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    add_product_,
    can_add_product,
)
from swiftlite.plan.low_precision import LowPrecision

_SMALLEST = 1e-30
"""Lower bound of a largest value, so that a row of zeros has a scale whose inverse is finite."""


@cache
def linear_classes(low: LowPrecision) -> tuple[type, type]:
    """Return the column-parallel and the row-parallel layer with products of this precision."""

    class Column(_Fp8Linear, ColumnParallelLinear):
        precision = low

    class Row(_Fp8Linear, RowParallelLinear):
        precision = low

    return Column, Row


class _Fp8Linear(nn.Module):
    """Computes the product of a layer of `tensor_parallel.py` in FP8 in training mode."""

    precision: ClassVar[LowPrecision]

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        if not self.training:
            return super()._forward_impl(input=input, weight=weight, **options)  # type: ignore[misc]
        output: Any = _Product.apply(input, weight, self.precision, options)
        if options["bias"] is None:
            return output
        return output + options["bias"]


class _Product(torch.autograd.Function):
    """Multiplies by a weight like megatron-core's function, including the exchange of tensor-parallel ranks.

    Args:
        options: arguments of `_forward_impl`. With `sequence_parallel`, each rank has a part of the sequence, and only
            this part is stored; with `allreduce_dgrad`, the gradient of the input is summed over ranks.
    """

    @staticmethod
    def forward(ctx, input: torch.Tensor, weight: torch.Tensor, low: LowPrecision, options: dict) -> torch.Tensor:
        ctx.save_for_backward(input if weight.requires_grad else None)
        ctx.weight, ctx.low, ctx.options = weight, low, options
        return product(_gathered(input, options), weight, low)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        (input,), (grad_output,) = ctx.saved_tensors, grad_outputs
        weight, options = ctx.weight, ctx.options
        whole = grad_input = product(grad_output, weight.t(), ctx.low, is_gradient=True)
        summed = None
        if options["sequence_parallel"]:
            grad_input = whole.new_empty(len(whole) // options["tp_group"].size(), *whole.shape[1:])
            # Asynchronously, while the gradient of the weight is computed below.
            summed = dist.reduce_scatter_tensor(grad_input, whole, group=options["tp_group"], async_op=True)
        elif options["allreduce_dgrad"]:
            summed = dist.all_reduce(grad_input, group=options["tp_group"], async_op=True)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            left, right = grad_output.flatten(0, -2).t(), _gathered(input, options).flatten(0, -2)
            if can_add_product(weight, options):
                add_product_(weight.main_grad, left, right)
            else:
                grad_weight = left @ right
        if summed is not None:
            summed.wait()
        return grad_input, grad_weight, None, None


def _gathered(input: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return the whole sequence, of which each rank has a part with `sequence_parallel`."""
    if not options["sequence_parallel"]:
        return input
    group = options["tp_group"]
    whole = input.new_empty(len(input) * group.size(), *input.shape[1:])
    dist.all_gather_into_tensor(whole, input.contiguous(), group=group)
    return whole


def product(left: torch.Tensor, right_NK: torch.Tensor, low: LowPrecision, is_gradient: bool = False) -> torch.Tensor:
    """Return `left @ right_NK.T` of quantized factors, rounded to bfloat16.

    Args:
        left: [..., K].
        is_gradient: whether `left` is a gradient. Its sums then keep full precision if each factor has one scale;
            torch's kernel for rows is written for fast sums.
    """
    is_rowwise = low.recipe == "rowwise"
    # The values of gradients differ by more orders of magnitude: e5m2 has a larger range, and fewer digits.
    dtype = torch.float8_e5m2 if is_gradient and low.format == "hybrid" else torch.float8_e4m3fn
    quantize = fused_quantize_rows if is_rowwise else fused_quantize
    left_MK, left_scale = quantize(left.detach().flatten(0, -2), dtype)
    right_NK, right_scale = quantize(right_NK.detach(), torch.float8_e4m3fn)
    # It requires the first factor in row-major and the second in column-major order.
    product_MN = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        left_MK,
        right_NK.t(),
        left_scale,
        right_scale.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=is_rowwise or not is_gradient,
    )
    return product_MN.view(*left.shape[:-1], -1)


def quantize_rows(tensor_MK: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a quantized tensor in row-major order, and the scales [M, 1] to multiply its rows by."""
    largest_M1 = tensor_MK.abs().amax(1, keepdim=True).float().clamp(min=_SMALLEST)
    scale_M1 = largest_M1 / torch.finfo(dtype).max
    return (tensor_MK.float() / scale_M1).to(dtype).contiguous(), scale_M1


def quantize(tensor_MK: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a quantized tensor in row-major order, and the scale to multiply it by."""
    scale = tensor_MK.abs().amax().float().clamp(min=_SMALLEST) / torch.finfo(dtype).max
    return (tensor_MK.float() / scale).to(dtype).contiguous(), scale


fused_quantize_rows = compiled(quantize_rows, static=(1,))
fused_quantize = compiled(quantize, static=(1,))
