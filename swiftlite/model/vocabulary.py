"""The two ends of a model, embedding and output layer, whose gradients are added where they are summed up.

Their weight is the largest of a small model, a fifth of SmolLM2-135M. Autograd makes a whole gradient of it for each
use, which is then added to the sum; the embedding's is nearly all zeros.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding as McoreVocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig


def add_gradients_in_place(model: torch.nn.Module) -> None:
    """Embedding and output layer add their gradients to `main_grad` themselves, from now on.

    The model is under megatron-core's DistributedDataParallel, whose hook then finds nothing left to add. Not with
    `overlap_grad_reduce`: there the hook counts on autograd's gradient (distributed_data_parallel.py:450 of 0.16.1).
    """
    for module in model.modules():
        if isinstance(module, (VocabParallelEmbedding, OutputLayer)):
            module.gradient_accumulation_fusion = True


class VocabParallelEmbedding(McoreVocabParallelEmbedding):
    """megatron-core's, with the rows of tokens that occur added to `main_grad`, instead of a gradient of all rows."""

    gradient_accumulation_fusion = False

    @classmethod
    def in_place_of(
        cls, stock: McoreVocabParallelEmbedding, config: TransformerConfig, tp_group: dist.ProcessGroup
    ) -> "VocabParallelEmbedding":
        """The same embedding, with the same weight."""
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
        """[B, S, H] of token ids [B, S]; with sequence parallelism this rank's [S, B, H]."""
        if not (self.gradient_accumulation_fusion and self.weight.requires_grad and torch.is_grad_enabled()):
            return super().forward(input_)
        is_elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        row = (input_ - self.vocab_start_index).masked_fill(is_elsewhere, 0)
        part = _Lookup.apply(row, self.weight)
        assert part is not None
        part = part.masked_fill(is_elsewhere[..., None], 0)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(part.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(part, group=self.tp_group)


class OutputLayer(ColumnParallelLinear):
    """megatron-core's column-parallel layer, with the weight's gradient added to `main_grad` by the product itself.

    megatron-core does so where Apex is installed (`gradient_accumulation_fusion`), in CUDA; torch can where weight and
    sum have the same precision.
    """

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        fuses = options["gradient_accumulation_fusion"] and weight.requires_grad and torch.is_grad_enabled()
        main_grad: Any = getattr(weight, "main_grad", None)
        if fuses and weight.dtype == main_grad.dtype:
            assert options["bias"] is None
            assert not options["sequence_parallel"]
            output = _Linear.apply(input, weight, options["tp_group"])
            assert output is not None
            return output
        return super()._forward_impl(input=input, weight=weight, **{**options, "gradient_accumulation_fusion": False})


class _Lookup(torch.autograd.Function):
    """Rows of a weight. It gives autograd no gradient of the weight: that is in `main_grad` then."""

    @staticmethod
    def forward(ctx, row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row)
        ctx.weight = weight
        return F.embedding(row, weight)

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[None, None]:
        (row,) = ctx.saved_tensors
        main_grad = ctx.weight.main_grad
        main_grad.index_add_(0, row.flatten(), grad_outputs[0].flatten(0, -2).to(main_grad.dtype))
        return None, None


class _Linear(torch.autograd.Function):
    """The product of states with a weight split over its rows; the weight's gradient as in `_Lookup`."""

    @staticmethod
    def forward(ctx, input: torch.Tensor, weight: torch.Tensor, tp_group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.weight = weight
        ctx.tp_group = tp_group
        return input.matmul(weight.t())

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (input,) = ctx.saved_tensors
        (grad_output,) = grad_outputs
        grad_input = grad_output.matmul(ctx.weight)
        summed = dist.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
        ctx.weight.main_grad.addmm_(grad_output.flatten(0, -2).t(), input.flatten(0, -2))
        if summed is not None:
            summed.wait()
        return grad_input, None, None
