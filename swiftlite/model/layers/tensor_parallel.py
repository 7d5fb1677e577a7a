"""megatron-core's tensor-parallel layers, with weight gradients accumulated directly in `main_grad`.

Without these layers, autograd allocates a whole weight gradient for each use, and the hook of DistributedDataParallel
adds it to `main_grad`. The gradient of an embedding is almost all zeros. For a linear layer, the addition can be fused
into the matrix product. megatron-core supports this with Apex on CUDA (`gradient_accumulation_fusion`). torch supports
it if weight and `main_grad` have the same precision, and on GPUs also if the weight is bfloat16. Linear layers use such
a fusion where possible; the embedding always accumulates directly. A float32 step of SmolLM2-135M takes 10 % less time
on two CPU cores.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear as McoreColumnParallelLinear
from megatron.core.tensor_parallel.layers import RowParallelLinear as McoreRowParallelLinear
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding as McoreVocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.autograd.function import once_differentiable

_CHUNK = 2**20
"""Number of elements of a gradient that are converted to float32 at once."""


class AddsGradients:
    """A layer that can add its weight's gradient to `main_grad` itself."""

    works_with_overlap: ClassVar[bool] = False
    """Whether the layer still returns a gradient to autograd, which the hook of `overlap_grad_reduce` requires
    (distributed_data_parallel.py:434 of 0.16.1)."""

    def add_gradients_in_place(self) -> None:
        self.gradient_accumulation_fusion = True


def add_gradients_in_place(model: torch.nn.Module, overlap_grad_reduce: bool) -> None:
    """Enable accumulation in `main_grad` in all layers that support it.

    The model must be wrapped in megatron-core's DistributedDataParallel. The hook of this wrapper then has no gradient
    to add.
    """
    for module in model.modules():
        if isinstance(module, AddsGradients) and (module.works_with_overlap or not overlap_grad_reduce):
            module.add_gradients_in_place()
    # Then the hook of DistributedDataParallel also starts the communication of a gradient.
    if overlap_grad_reduce:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.is_cuda and parameter.dtype != torch.float32:
            parameter.register_post_accumulate_grad_hook(_add_in_chunks)


def _add_in_chunks(parameter: Any) -> None:
    """Add a gradient to `main_grad` in place of the hook of DistributedDataParallel, with the same result.

    On a CPU, torch converts a whole bfloat16 gradient to float32 before it adds it. The copy of the largest gradient of
    an 8B model has 0.4 GB.
    """
    gradient = parameter.grad
    if gradient is not None and not parameter.grad_added_to_main_grad:
        rows = max(1, _CHUNK // gradient[0].numel())
        for total, part in zip(parameter.main_grad.split(rows), gradient.split(rows), strict=True):
            total.add_(part)
    parameter.grad = None


class ColumnParallelLinear(AddsGradients, McoreColumnParallelLinear):
    """megatron-core's layer with the bias added before the product is rounded.

    megatron-core's layer rounds twice (product, then sum), which changes bfloat16 logits of a tiny Qwen2 by 0.01. With
    a tensor-parallel size of 1, torch's linear function is used, because there is no communication to overlap.
    """

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        bias = options["bias"]
        if bias is not None and options["tp_group"].size() == 1:
            return F.linear(input, weight, bias)
        if _adds_in_place(weight, options):
            return _linear(input, weight, options)
        # megatron-core's own fusion requires Apex.
        return super()._forward_impl(input=input, weight=weight, **{**options, "gradient_accumulation_fusion": False})


class RowParallelLinear(AddsGradients, McoreRowParallelLinear):
    """megatron-core's layer with the weight's gradient accumulated in place."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        if _adds_in_place(weight, options):
            return _linear(input, weight, options)
        return super()._forward_impl(input=input, weight=weight, **{**options, "gradient_accumulation_fusion": False})


def _adds_in_place(weight: Any, options: dict[str, Any]) -> bool:
    """Return whether `_linear` can replace megatron-core's product. It cannot if the product gathers the sequence."""
    if options["bias"] is not None or options["sequence_parallel"] or not torch.is_grad_enabled():
        return False
    return can_add_product(weight, options)


def can_add_product(weight: Any, options: dict[str, Any]) -> bool:
    """Return whether the gradient of a layer's weight is added to `main_grad` with `add_product_`.

    Args:
        options: arguments of `_forward_impl`.
    """
    if not (options["gradient_accumulation_fusion"] and weight.requires_grad):
        return False
    return weight.dtype == weight.main_grad.dtype or (weight.is_cuda and sums_products_in_float32(weight.dtype))


@cache
def sums_products_in_float32(dtype: torch.dtype) -> bool:
    """Return whether a GPU kernel can add a product of matrices of this dtype to a float32 matrix.

    torch supports this only on CUDA (`addmm` with `out_dtype`) and not in every build, so it is tried once on
    small matrices.
    """
    one = torch.ones(16, 16, dtype=dtype, device="cuda")
    total = torch.ones(16, 16, device="cuda")
    try:
        torch.addmm(total, one, one, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    # One, and the sum of 16 products of ones.
    return bool((total == 17).all())


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left @ right` to `total`, which has the same or a higher precision. The product is not rounded before the
    addition, except on a GPU without `sums_products_in_float32`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif not left.is_cuda:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    elif sums_products_in_float32(left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


def _linear(input: torch.Tensor, weight: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    group = options["tp_group"] if options["allreduce_dgrad"] else None
    return _Linear.apply(input, weight, group)  # type: ignore[return-value]


class VocabParallelEmbedding(AddsGradients, McoreVocabParallelEmbedding):
    """megatron-core's embedding; the backward pass updates only the rows of occurring tokens in `main_grad`."""

    gradient_accumulation_fusion = False

    @classmethod
    def in_place_of(
        cls, stock: McoreVocabParallelEmbedding, config: TransformerConfig, tp_group: dist.ProcessGroup
    ) -> "VocabParallelEmbedding":
        """Create an embedding that replaces `stock` and takes over its weight."""
        # Its own weight is never used, so it takes no memory.
        with torch.device("meta"):
            embedding = cls(
                stock.num_embeddings,
                stock.embedding_dim,
                init_method=torch.nn.init.zeros_,
                reduce_scatter_embeddings=stock.reduce_scatter_embeddings,
                config=config,
                tp_group=tp_group,
            )
        embedding.weight = stock.weight
        return embedding

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return embeddings [B, S, H] of token ids [B, S]; with sequence parallelism, this rank's part [S, B, H]."""
        learns = self.weight.requires_grad and torch.is_grad_enabled()
        # `index_add_` in the backward pass adds in varying order on a GPU.
        if not (self.gradient_accumulation_fusion and learns) or self.deterministic_mode:
            return super().forward(input_)
        part = self._rows(input_)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(part.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(part, group=self.tp_group)

    def _rows(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens whose rows are on this rank; zeros for other tokens."""
        group: Any = self.tp_group
        if group.size() == 1:
            return _lookup(input_, self.weight)
        is_elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        # Any row of this rank, because the result is masked.
        row = (input_ - self.vocab_start_index).masked_fill(is_elsewhere, 0)
        return _lookup(row, self.weight).masked_fill(is_elsewhere[..., None], 0)


class _Linear(torch.autograd.Function):
    """Multiplies by a weight, and adds the weight's gradient to `main_grad` instead of returning it to autograd.

    Args:
        tp_group: ranks that each hold a part of the weight's rows, over which the input's gradient is summed.
    """

    @staticmethod
    def forward(ctx, input: torch.Tensor, weight: torch.Tensor, tp_group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.weight = weight
        ctx.tp_group = tp_group
        return input.matmul(weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (input,) = ctx.saved_tensors
        (grad_output,) = grad_outputs
        grad_input = grad_output.matmul(ctx.weight)
        summed = None
        if ctx.tp_group is not None:
            # Asynchronously, while the gradient of the weight is computed.
            summed = dist.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
        add_product_(ctx.weight.main_grad, grad_output.flatten(0, -2).t(), input.flatten(0, -2))
        if summed is not None:
            summed.wait()
        return grad_input, None, None


def _lookup(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _Lookup.apply(row, weight)  # type: ignore[return-value]


class _Lookup(torch.autograd.Function):
    """Selects rows of a weight, and adds the gradient of these rows to `main_grad` instead of returning it to
    autograd."""

    @staticmethod
    def forward(ctx, row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row)
        ctx.weight = weight
        return F.embedding(row, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[None, None]:
        (row,) = ctx.saved_tensors
        main_grad = ctx.weight.main_grad
        main_grad.index_add_(0, row.flatten(), grad_outputs[0].flatten(0, -2).to(main_grad.dtype))
        return None, None


def sum_over_sequence_ranks(config: TransformerConfig, parameters: Iterable[nn.Parameter]) -> None:
    """Let megatron-core sum the gradients of parameters that every tensor-parallel rank has.

    With sequence parallelism, each rank computes the gradient of its part of the row.
    """
    for parameter in parameters:
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
