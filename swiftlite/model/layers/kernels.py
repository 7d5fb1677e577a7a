"""Select the classes of layers for a `Kernels` value. No other module selects classes by kernel."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear as McoreColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from swiftlite.model.attention.attention import CoreAttention
from swiftlite.model.attention.draft_attention import DraftAttention
from swiftlite.model.attention.head_size import Sizes, fill_values, fill_values_in_halves
from swiftlite.model.attention.merged_attention import PrefixKernel
from swiftlite.model.layers.compiled import raise_version_limit
from swiftlite.model.layers.experts import GroupedMLP, SequentialMLP
from swiftlite.model.layers.fp8 import linear_classes
from swiftlite.model.layers.norm import FusedRMSNorm, LastRoundedRMSNorm, RMSNorm, returning_input
from swiftlite.model.layers.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from swiftlite.plan.kernels import FlashImpl, Kernels
from swiftlite.plan.low_precision import LowPrecision

VarlenKernel = Callable[..., Any]


@dataclass(frozen=True)
class Modules:
    """The modules of a layer, in the form of megatron-core's specs.

    Attributes:
        keeping_norm: a norm like `norm` that also returns its input, see `norm.returning_input`.
        down_projection: down-projection of latent attention, whose columns are gathered afterwards.
        experts: experts of one rank.
        core_attention: attention of decoder layers and heads.
        draft_attention: attention of unrolled heads.
        low_precision: precision of the products of `column` and `row`; None for the model's precision.
    """

    norm: type
    norm_returning_input: type
    column: type
    row: type
    down_projection: type
    experts: type
    core_attention: ModuleSpec
    draft_attention: ModuleSpec
    low_precision: LowPrecision | None = None

    def in_layer(self, number: int, num_layers: int) -> "Modules":
        """Return the modules of the trunk's decoder layer `number` (from 0). The first and the last layers may stay in
        bfloat16."""
        if self.low_precision is None or self.low_precision.is_in_layer(number, num_layers):
            return self
        return replace(self, column=ColumnParallelLinear, row=RowParallelLinear)


def modules_of(kernels: Kernels, *, norms_round_last: bool = False) -> Modules:
    """Return the classes of layers that use these kernels.

    Args:
        norms_round_last: whether norms round only after the multiplication by the weight. Fused norms always do.

    Raises:
        OptionError: the GPU does not support the precision.
        ImportError: a package is missing; `plan.kernels.choose` checks this earlier.
    """
    if kernels.flash_impl:
        _activate(kernels.flash_impl)
    if kernels.is_fused or kernels.low_precision:
        raise_version_limit()
    norm = FusedRMSNorm if kernels.is_fused else LastRoundedRMSNorm if norms_round_last else RMSNorm
    column, row, attention = ColumnParallelLinear, RowParallelLinear, CoreAttention
    experts = GroupedMLP if kernels.has_grouped_experts else SequentialMLP
    if kernels.transformer_impl == "transformer_engine":
        from swiftlite.model.layers import te

        norm, column, row = te.RMSNorm, te.ColumnParallelLinear, te.RowParallelLinear
        if kernels.attention == "te":
            attention = te.CoreAttention
        if kernels.has_grouped_experts:
            experts = te.GroupedMLP
        if kernels.low_precision is not None:
            te.check_available(kernels.low_precision)
    low = kernels.low_precision if kernels.transformer_impl == "local" else None
    if low is not None:
        column, row = linear_classes(low)
    # Also for Transformer Engine's attention, which leaves windows and sinks to swiftlite's.
    params: dict[str, Any] = {"varlen": varlen_kernel(kernels), "prefix": prefix_kernel(kernels)}
    if kernels.attention != "te":
        params |= {"prefers_cudnn": kernels.prefers_cudnn, "packs_with_cudnn": kernels.packs_with_cudnn}
    return Modules(
        norm=norm,
        norm_returning_input=returning_input(norm),
        column=column,
        row=row,
        # megatron-core does not accept a subclass here. This layer has no bias, and autograd computes its gradients.
        down_projection=McoreColumnParallelLinear,
        experts=experts,
        core_attention=ModuleSpec(module=attention, params=params),
        draft_attention=ModuleSpec(module=DraftAttention, params=params),
        low_precision=low,
    )


def _activate(impl: FlashImpl) -> None:
    """Set torch's attention implementation for all models of this process."""
    from torch.nn import attention  # missing in early releases of torch 2

    if attention.current_flash_attention_impl() != impl:
        attention.activate_flash_attention_impl(impl)


def varlen_kernel(kernels: Kernels) -> VarlenKernel | None:
    """Return the kernel for all sequences of a packed row; None if each sequence is a separate call.

    The kernel is called as `kernel(q_TND, k_TGD, v_TGD, cu_q, cu_k, max_q, max_k, scale=, window=)`. Its causal mask is
    aligned to the lower right: the last query of a sequence sees the sequence's last key. With a `window`, a query sees
    this number of keys; default: all.
    """
    if kernels.attention == "flash_attn":
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        options = {"causal": True, "deterministic": kernels.is_deterministic}
        return fill_values(
            lambda *args, scale, window=None: flash_attn_varlen_func(
                *args, softmax_scale=scale, window_size=_window_size(window), **options
            )
        )
    if kernels.attention == "torch_varlen":
        from torch.nn.attention.varlen import varlen_attn

        options: dict[str, Any] = {}
        # torch 2.11 does not have this argument: its kernel always supports fewer key heads than query heads.
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        return fill_values(
            lambda *args, scale, window=None: varlen_attn(
                *args, scale=scale, window_size=_window_size(window), **options
            ),
            others=_other_sizes(kernels),
        )
    return None


def _window_size(window: int | None) -> tuple[int, int]:
    """Return the numbers of keys before and after a query's own key that the query sees; -1 for all."""
    return (-1 if window is None else window - 1, 0)


def _other_sizes(kernels: Kernels) -> tuple[Sizes, ...]:
    """Return the pairs (key size, value size) with unequal sizes that the kernel supports.

    Flash-attn 2 (csrc/flash_attn/flash_api.cpp:615 of 2.8.3) and its copy in torch support none; flash-attn 3
    (hopper/flash_api.cpp:783) and 4 (flash_attn/cute/interface.py:114) support the sizes of DeepSeek.
    """
    if kernels.flash_impl is None:
        return ()
    return ((192, 128),)


def prefix_kernel(kernels: Kernels) -> PrefixKernel | None:
    """Return the kernel's forward and backward functions; None if they are not available.

    These functions return and read the log-sum-exp of each query.
    """
    if kernels.attention == "flash_attn":
        return fill_values_in_halves(_flash_attn_in_halves(kernels.is_deterministic))
    if kernels.attention == "torch_varlen":
        return fill_values_in_halves(PrefixKernel(_torch_forward, _torch_backward), others=_other_sizes(kernels))
    return None


def _flash_attn_in_halves(is_deterministic: bool) -> PrefixKernel:
    """Return forward and backward functions of flash-attn 2 (flash_attn_interface.py of 2.8)."""
    from flash_attn import flash_attn_interface as package  # pyright: ignore[reportMissingImports]

    options = {"softcap": 0.0, "alibi_slopes": None}

    def forward(query, key, value, cu_q, cu_k, longest_q, longest_k, scale, window=None):
        left, right = (-1, -1) if window is None else _window_size(window)
        out, lse, *_ = package._flash_attn_varlen_forward(
            *(query, key, value, cu_q, cu_k, longest_q, longest_k, 0.0, scale),
            causal=True,
            window_size_left=left,
            window_size_right=right,
            **options,
        )
        return out, lse

    def backward(grad, query, key, value, out, lse, cu_q, cu_k, longest_q, longest_k, scale, window=None):
        left, right = (-1, -1) if window is None else _window_size(window)
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        package._flash_attn_varlen_backward(
            *(grad, query, key, value, out, lse, *grads, cu_q, cu_k, longest_q, longest_k, 0.0, scale),
            causal=True,
            deterministic=is_deterministic,
            window_size_left=left,
            window_size_right=right,
            **options,
        )
        return grads

    return PrefixKernel(forward, backward)


def _torch_forward(query, key, value, cu_q, cu_k, longest_q, longest_k, scale, window=None):
    """Call torch's kernel as in torch/nn/attention/varlen.py (2.13); return its output and log-sum-exp."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, cu_q, cu_k, longest_q, longest_k, 0.0, True),
        return_debug_mask=False,
        scale=scale,
        **_torch_window(window),
    )
    return out, lse


def _torch_backward(grad, query, key, value, out, lse, cu_q, cu_k, longest_q, longest_k, scale, window=None):
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # unused, because there is no dropout
    return torch.ops.aten._flash_attention_backward(
        *(grad, query, key, value, out, lse, cu_q, cu_k, longest_q, longest_k, 0.0, True, seed, seed[:0]),
        scale=scale,
        **_torch_window(window),
    )


def _torch_window(window: int | None) -> dict[str, int]:
    if window is None:
        return {}
    left, right = _window_size(window)
    return {"window_size_left": left, "window_size_right": right}
