"""From `Kernels`, a value, to classes: the only place that chooses them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear as McoreColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from swiftlite.model.attention import CoreAttention
from swiftlite.model.draft_attention import DraftAttention
from swiftlite.model.experts import GroupedMLP, SequentialMLP
from swiftlite.model.norm import FusedRMSNorm, RMSNorm, keeping
from swiftlite.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from swiftlite.plan.kernels import Kernels

VarlenKernel = Callable[..., Any]


@dataclass(frozen=True)
class Modules:
    """What stands at each place of a layer, as megatron-core's specs take it.

    Attributes:
        keeping_norm: `norm` whose output has its input as well, see `norm.keeping`.
        down_projection: of latent attention, whose columns are gathered afterwards.
        experts: of one rank.
        core_attention, draft_attention: of decoder layers and heads; of heads that are unrolled.
    """

    norm: type
    keeping_norm: type
    column: type
    row: type
    down_projection: type
    experts: type
    core_attention: ModuleSpec
    draft_attention: ModuleSpec


def modules_of(kernels: Kernels) -> Modules:
    """The classes that compute so.

    Raises:
        OptionError: the GPU does not compute in such precision.
        ImportError: a package is missing that `plan.kernels.choose` has looked for.
    """
    norm = FusedRMSNorm if kernels.is_fused else RMSNorm
    column, row, attention = ColumnParallelLinear, RowParallelLinear, CoreAttention
    experts = GroupedMLP if kernels.has_grouped_experts else SequentialMLP
    if kernels.transformer_impl == "transformer_engine":
        from swiftlite.model import te

        norm, column, row = te.RMSNorm, te.ColumnParallelLinear, te.RowParallelLinear
        if kernels.attention == "te":
            attention = te.CoreAttention
        if kernels.has_grouped_experts:
            experts = te.GroupedMLP
        if kernels.low_precision is not None:
            te.check_available(kernels.low_precision)
    params = {"varlen": varlen_kernel(kernels)}
    return Modules(
        norm=norm,
        keeping_norm=keeping(norm),
        column=column,
        row=row,
        # megatron-core's own: it accepts no subclass here. There is no bias; these gradients go through autograd.
        down_projection=McoreColumnParallelLinear,
        experts=experts,
        core_attention=ModuleSpec(module=attention, params=params),
        draft_attention=ModuleSpec(module=DraftAttention, params=params),
    )


def varlen_kernel(kernels: Kernels) -> VarlenKernel | None:
    """`kernel(q_TND, k_TGD, v_TGD, cu_q, cu_k, max_q, max_k, scale=)` over all sequences of a packed row; None where
    each is a call of its own.

    Causal from the lower right: the last query of a sequence sees its last key.
    """
    if kernels.attention == "flash_attn":
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        return lambda *args, scale: flash_attn_varlen_func(*args, softmax_scale=scale, causal=True)
    if kernels.attention == "torch_varlen":
        from torch.nn.attention.varlen import varlen_attn

        return lambda *args, scale: varlen_attn(*args, scale=scale, window_size=(-1, 0), enable_gqa=True)
    return None
