"""Layers of Transformer Engine with the same parameters as swiftlite's layers.

Weight conversion, checkpoints and exports are therefore the same for both kinds of layers. Only `kernels.py` imports
this module, and only if the package is installed. Linear layers are megatron-core's wrappers of Transformer Engine's
layers. RMSNorm is a class here, because megatron-core provides it only as a function. The embedding and the output
layer always use torch.
"""

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TERowParallelLinear,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine.pytorch import (  # pyright: ignore[reportMissingImports]
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from transformer_engine.pytorch import RMSNorm as TERMSNorm  # pyright: ignore[reportMissingImports]
from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # pyright: ignore[reportMissingImports]

from swiftlite.base.errors import OptionError
from swiftlite.model.attention import attention
from swiftlite.model.attention.cache import Cache
from swiftlite.model.context_parallel import causal_segments, shared_row
from swiftlite.model.layers import experts
from swiftlite.model.layers.tensor_parallel import AddsGradients
from swiftlite.plan.low_precision import LowPrecision


class RMSNorm(TERMSNorm):
    """Transformer Engine's RMSNorm for megatron-core, which multiplies by the weight before rounding."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(
            hidden_size,
            eps=eps,
            sequence_parallel=config.sequence_parallel,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            dtype=config.params_dtype,
            device=device,
        )


class _Linear(AddsGradients):
    """A layer that accumulates gradients in `main_grad` of any precision. megatron-core's hook can still overlap
    communication.
    """

    works_with_overlap = True
    is_expert = explicit_expert_comm = False  # read by adapters; never used for experts

    def add_gradients_in_place(self) -> None:
        self.fuse_wgrad_accumulation = True


class ColumnParallelLinear(_Linear, TEColumnParallelLinear):
    """megatron-core's wrapper of Transformer Engine's column-parallel layer."""


class RowParallelLinear(_Linear, TERowParallelLinear):
    """megatron-core's wrapper of Transformer Engine's row-parallel layer."""


class GroupedMLP(experts.GroupedMLP):
    """Experts whose matrix products Transformer Engine computes, also in FP8.

    The parameters are those of `SequentialMLP`. Two layers of Transformer Engine, which are not part of the model,
    compute with references to these parameters.
    """

    works_with_overlap = True

    def __init__(self, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(num_local_experts, config, *args, **kwargs)
        self.borrowers = {linear: _Borrower(self.weights(linear)) for linear in ("linear_fc1", "linear_fc2")}
        self.pad, self.unpad = Fp8Padding(num_local_experts), Fp8Unpadding(num_local_experts)

    def add_gradients_in_place(self) -> None:
        for borrower in self.borrowers.values():
            borrower.linear.fuse_wgrad_accumulation = True

    def products(self, hidden_TH: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the experts for tokens sorted by expert; in FP8 tokens are padded with zero rows."""
        counts = padded = tokens_per_expert.tolist()
        is_low = FP8GlobalStateManager.is_fp8_enabled()
        if is_low:
            hidden_TH, padded = self.pad(hidden_TH, counts)

        def product(linear: str, tokens: torch.Tensor) -> torch.Tensor:
            output = self.borrowers[linear](self.weights(linear), tokens, padded)
            output = self.with_biases(linear, output, torch.tensor(padded))
            return self.with_adapters(linear, tokens, output, padded)  # padding remains zero

        output_TH = product("linear_fc2", self.activation(product("linear_fc1", hidden_TH)))
        if is_low:
            output_TH = self.unpad(output_TH, counts)
        return output_TH


class _Borrower:
    """A layer of Transformer Engine that computes with the weights of other modules."""

    def __init__(self, weights: list[torch.Tensor]):
        out_features, in_features = weights[0].shape
        # Without memory for its weights, which the first call replaces.
        options: dict[str, Any] = {"bias": False, "params_dtype": weights[0].dtype, "device": "meta"}
        self.linear = GroupedLinear(len(weights), in_features, out_features, **options)

    def __call__(self, weights: list[torch.Tensor], hidden: torch.Tensor, counts: list[int]) -> torch.Tensor:
        if self.linear.weight0 is not weights[0]:  # at the first call, or after all weights were replaced
            for index, weight in enumerate(weights):
                setattr(self.linear, f"weight{index}", weight)
                setattr(self.linear, f"bias{index}", hidden.new_empty(0))
        return self.linear(hidden, counts)


def check_available(precision: LowPrecision) -> None:
    """Check that this GPU supports the precision.

    Raises:
        OptionError: the GPU does not support the precision, with Transformer Engine's reason.
    """
    asked = {
        "tensorwise": is_fp8_available,
        "blockwise": is_fp8_block_scaling_available,
        "mxfp8": is_mxfp8_available,
        "nvfp4": is_nvfp4_available,
    }
    is_available, reason = asked[precision.recipe](return_reason=True)
    if not is_available:
        raise OptionError([(f"{precision.flag}: {reason}", f"use another recipe, or omit {precision.flag}")])


class CoreAttention(attention.CoreAttention):
    """Transformer Engine's attention; with a KV cache, a mask, a window or sinks, swiftlite's own is used
    instead."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        pg_collection: ProcessGroupCollection,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **options: Any,
    ):
        super().__init__(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            pg_collection=pg_collection,
            k_channels=k_channels,
            **options,
        )
        self.kernel = TEDotProductAttention(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            softmax_scale=self.softmax_scale,
            k_channels=k_channels,
            v_channels=v_channels,
            pg_collection=pg_collection,
        )

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        attention_mask: torch.Tensor | Cache | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Compute attention, with the arguments of `attention.CoreAttention.forward`, without context parallelism."""
        if attention_mask is not None or self.window is not None or self.softmax_offset is not None:
            return super().forward(
                query_SBND, key_SBGD, value_SBGD, attention_mask, packed_seq_params=packed_seq_params
            )
        mask_type = AttnMaskType.causal
        if packed_seq_params is not None:
            # Transformer Engine accepts packed rows (`thd`) only with a mask for padding.
            mask_type = AttnMaskType.padding_causal
            lengths, _ = shared_row(query_SBND.size(0), packed_seq_params, self.cp_group)
            packed_seq_params = _on_device(lengths, query_SBND.device)
        out = self.kernel(
            query_SBND, key_SBGD, value_SBGD, None, attn_mask_type=mask_type, packed_seq_params=packed_seq_params
        )
        if packed_seq_params is not None:
            out = out.view(len(query_SBND), -1)
        return out


def _on_device(lengths: tuple[int, ...], device: torch.device) -> PackedSeqParams:
    """Return the starts of the sequences of a row on the device, copied once for all layers."""
    _, starts, _, longest, _ = attention.offsets(causal_segments(lengths, rank=0, size=1), 1, sum(lengths), device)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
    )
