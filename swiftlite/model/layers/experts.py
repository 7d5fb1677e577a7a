"""The experts of one rank. Each expert is a gated MLP; experts are computed one by one or as one grouped matrix
product.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP as McoreSequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable

from swiftlite.model.copied_config import with_settings
from swiftlite.model.layers.compiled import compiled
from swiftlite.model.layers.swiglu import GeGLU, LimitedSwiGLU, unfused
from swiftlite.model.layers.tensor_parallel import AddsGradients
from swiftlite.runtime.device import on_device

ALIGNMENT = 16
"""Alignment of the rows of each matrix that `grouped_mm` requires, in bytes."""


class SequentialMLP(McoreSequentialMLP):
    """megatron-core's class, with the routing weight applied to an expert's output, as in transformers.

    The class of megatron-core applies the weight between the expert's two matrices. In bfloat16 this rounds
    differently, enough to route some tokens to other experts in the next layer.

    Gradients are always summed over the ranks that hold the same expert (the attribute `allreduce` of the parameters is
    False). megatron-core does this only with expert parallelism. Without it, megatron-core sums over the wrong ranks if
    expert tensor parallelism (ETP) and tensor parallelism (TP) have different sizes: with TP 2 and ETP 1, half of the
    gradient is silently lost (tensor_parallel/layers.py:886 of 0.16.1).

    Args:
        latent: size of the states that the experts read and write; None: that of the model's states.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *args: Any,
        latent: int | None = None,
        **kwargs: Any,
    ):
        if latent is not None:
            config = with_settings(config, hidden_size=latent)
        activation: Any = submodules.activation_func
        if issubclass(activation, LimitedSwiGLU | GeGLU):  # `GroupedMLP` has a fused SwiGLU
            config = unfused(config)
        super().__init__(num_local_experts, config, submodules, *args, **kwargs)
        if config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
            for parameter in self.parameters():
                parameter.allreduce = False  # type: ignore[attr-defined]
        if config.add_bias_linear:
            self._mark_biases()
            # Rows of gate and up alternate (`families/mlp.py`), so a rank's rows are consecutive in the whole matrix.
            # megatron-core would store the first and the second half of a rank's rows apart.
            ungated = with_settings(self.config, gated_linear_unit=False)
            experts: list[Any] = list(self.local_experts)
            for expert in experts:
                expert.config = ungated

    def _mark_biases(self) -> None:
        """Mark the biases of this rank's experts, so that they are treated like the weights.

        megatron-core would add up the gradients of different experts over tensor-parallel ranks, and count only those
        of the first rank in the gradient norm. Expert tensor parallelism is not supported with biases.
        """
        for expert in self.local_experts:
            bias: Any = expert.get_parameter("linear_fc2.bias")
            bias.sequence_parallel = False
            set_tensor_model_parallel_attributes(bias, is_parallel=True, dim=0, stride=1)

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return outputs [T, H] for tokens [T, H] sorted by expert.

        Args:
            tokens_per_expert: number of tokens of each expert.
            permuted_probs: [T], the routing weight of each token.
        """
        counts = tokens_per_expert.tolist()
        groups = zip(permuted_local_hidden_states.split(counts), permuted_probs.split(counts), strict=True)
        outputs = [
            (_with_bias(*expert(hidden_TH)) * probs_T[:, None]).to(hidden_TH.dtype)
            for expert, (hidden_TH, probs_T) in zip(self.local_experts, groups, strict=True)
        ]
        return torch.cat(outputs), None


def _with_bias(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return output if bias is None else output + bias


class GroupedMLP(AddsGradients, SequentialMLP):
    """Experts with the parameters of `SequentialMLP`, computed as one grouped product per matrix.

    On a GPU with a hundred experts, launching a separate product for each expert would take most of a step. The numbers
    of tokens per expert are copied to the host only if there are adapters, because each adapter is called with the
    tokens of its expert. Matrices that are not aligned are multiplied one by one.
    """

    works_with_overlap = True
    gradient_accumulation_fusion = False

    def __init__(self, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(num_local_experts, config, *args, **kwargs)
        first: Any = self.local_experts[0]
        down = first.linear_fc2.weight
        # Both axes, because the backward pass multiplies by the transposed matrices.
        self.is_aligned = all(size * down.element_size() % ALIGNMENT == 0 for size in down.shape)
        if self.config.bias_activation_fusion:
            self.activation = _fused_swiglu
        else:
            self.activation = first.activation_func

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return outputs [T, H] for tokens [T, H] sorted by expert, with the arguments of `SequentialMLP.forward`."""
        hidden_TH = permuted_local_hidden_states
        if not len(hidden_TH) or not self.is_aligned:
            return super().forward(hidden_TH, tokens_per_expert, permuted_probs)
        output_TH = self.products(hidden_TH, tokens_per_expert)
        return (output_TH * permuted_probs[:, None]).to(hidden_TH.dtype), None

    def products(self, hidden_TH: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """Return the outputs [T, H] of the experts for tokens [T, H] sorted by expert."""
        ends = on_device(tokens_per_expert.cumsum(0, dtype=torch.int32), hidden_TH.device)
        counts = tokens_per_expert.tolist() if self.has_adapters() else []

        def product(linear: str, tokens: torch.Tensor) -> torch.Tensor:
            output = grouped_linear(tokens, ends, self.weights(linear), self.gradient_accumulation_fusion)
            output = self.with_biases(linear, output, tokens_per_expert)
            return self.with_adapters(linear, tokens, output, counts)

        return product("linear_fc2", self.activation(product("linear_fc1", hidden_TH)))

    def has_adapters(self) -> bool:
        """Return whether any matrix has a forward hook, such as an adapter's."""
        first: Any = self.local_experts[0]
        return bool(first.linear_fc1._forward_hooks or first.linear_fc2._forward_hooks)

    def with_biases(self, linear: str, output: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """Return the output of "linear_fc1" or "linear_fc2" of all experts plus their biases, if they have biases.

        Args:
            tokens_per_expert: number of tokens of each expert.
        """
        if not self.config.add_bias_linear:
            return output
        bias_EO = torch.stack([getattr(expert, linear).bias for expert in self.local_experts])
        counts = on_device(tokens_per_expert, output.device)
        return output + bias_EO.repeat_interleave(counts, dim=0, output_size=len(output))

    def with_adapters(self, linear: str, tokens: torch.Tensor, output: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the output of "linear_fc1" or "linear_fc2" of all experts, after their forward hooks (adapters).

        Args:
            counts: number of tokens of each expert.
        """
        if not self.has_adapters():
            return output
        parts = []
        for expert, own, part in zip(self.local_experts, tokens.split(counts), output.split(counts), strict=True):
            module = getattr(expert, linear)
            # The grouped product does not call the modules, so their hooks are called here.
            for hook in module._forward_hooks.values():
                part, _ = hook(module, (own,), (part, None))
            parts.append(part)
        return torch.cat(parts)

    def weights(self, linear: str) -> list[torch.Tensor]:
        """Return the weights of all experts' "linear_fc1" or "linear_fc2", after running the pre-forward hooks of these
        layers.

        With `overlap_param_gather`, the hooks wait until the weights are gathered (distributed_data_parallel.py:384 of
        0.16.1).
        """
        linears = [getattr(expert, linear) for expert in self.local_experts]
        for each in linears:
            for hook in each._forward_pre_hooks.values():
                hook(each, ())
        return [each.weight for each in linears]


def _fused_swiglu(gate_up: Any) -> Any:
    return bias_swiglu_impl(gate_up, None)


def grouped_linear(
    hidden_TI: torch.Tensor, ends: torch.Tensor, weights: Sequence[torch.Tensor], adds_gradients: bool = False
) -> torch.Tensor:
    """Apply each expert's matrix to its tokens: [T, out] for tokens [T, in] sorted by expert.

    Args:
        ends: [E] int32, end of each expert's tokens.
        weights: matrix [out, in] of each expert.
        adds_gradients: whether the backward pass accumulates the weights' gradients in `main_grad`.
    """
    return _GroupedLinear.apply(hidden_TI, ends, adds_gradients, *weights)  # type: ignore[return-value]


class _GroupedLinear(torch.autograd.Function):
    """Concatenates the weights for the grouped kernel.

    The weights are concatenated again in the backward pass, so that no copy is stored.
    """

    @staticmethod
    def forward(
        ctx, hidden_TI: torch.Tensor, ends: torch.Tensor, adds_gradients: bool, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_TI, ends, *weights)
        ctx.weights = weights if adds_gradients else ()  # saved tensors are returned as new objects without main_grad
        return F.grouped_mm(hidden_TI, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TI, ends, *weights = ctx.saved_tensors
        grad_output = grad_outputs[0].contiguous()
        grad_hidden = F.grouped_mm(grad_output, torch.stack(weights), offs=ends)
        if not any(ctx.needs_input_grad[3:]):
            return grad_hidden, None, None, *[None for _ in weights]
        # With two matrices, `offs` divides the sums: one product for each expert, over its tokens.
        grad_weights = F.grouped_mm(grad_output.t(), hidden_TI, offs=ends)
        if ctx.weights:
            return grad_hidden, None, None, *added(ctx.weights, grad_weights)
        return grad_hidden, None, None, *grad_weights.unbind()


def added(weights: Sequence[Any], grad_EOI: torch.Tensor) -> Sequence[torch.Tensor]:
    """Accumulate the gradients of all experts' matrices in `main_grad`, and return placeholders for autograd.

    megatron-core's DistributedDataParallel adds each gradient in a separate hook, with 256 kernel launches in a layer
    of 128 experts.
    """
    main_EOI = together([weight.main_grad for weight in weights])
    if main_EOI is None:
        for weight, gradient in zip(weights, grad_EOI, strict=True):
            weight.main_grad.add_(gradient)
    else:
        fused_add_reversed_(main_EOI, grad_EOI)
    for weight in weights:
        # Otherwise the hook of DistributedDataParallel would add the gradient a second time.
        weight.grad_added_to_main_grad = True
    # The hook requires a gradient, but does not read it (distributed_data_parallel.py:434 of 0.16.1).
    return grad_EOI.unbind()


def together(main_grads: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return `main_grad` of all experts as one strided view, with the last expert first.

    None if the gradients are not at equal distances in memory. Buffers of DistributedDataParallel are filled from the
    last parameter to the first (param_and_grad_buffer.py:717 of 0.16.1). With two experts, a buffer thus contains fc2
    and fc1 of expert 1, then fc2 and fc1 of expert 0.
    """
    last = main_grads[-1]
    if len({each.untyped_storage().data_ptr() for each in main_grads}) > 1:
        return None
    places = [each.storage_offset() for each in reversed(main_grads)]
    distances = {after - before for before, after in itertools.pairwise(places)} or {last.numel()}
    if len(distances) > 1 or min(distances) < last.numel():
        return None
    return last.as_strided((len(main_grads), *last.shape), (distances.pop(), *last.stride()))


def _add_reversed_(main_EOI: torch.Tensor, grad_EOI: torch.Tensor) -> None:
    main_EOI.add_(grad_EOI.flip(0))


fused_add_reversed_ = compiled(_add_reversed_)
"""`_add_reversed_`, compiled to one kernel that reads the gradients in reverse order instead of copying them."""
