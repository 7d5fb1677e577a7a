"""A kernel of vLLM for linear layers in FP8 on a CPU.

On most CPUs vLLM 0.32 computes FP8 layers without blocks with `torch._scaled_mm`, whose CPU implementation is slow: the
product of 24 tokens and a matrix of 576 x 3072 took 1.9 s on a Xeon with AMX, and 5 ms with the kernel below. Both
multiply the same numbers, because bfloat16 and float32 represent every FP8 value exactly.
"""

import os

import torch
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.platforms import PlatformEnum, current_platform

SLOW_KERNELS = ("PerTensorTorchFP8ScaledMMLinearKernel", "ChannelWiseTorchFP8ScaledMMLinearKernel")
"""Kernels of vLLM that compute with `torch._scaled_mm`."""


class ConvertedFP8LinearKernel(FP8ScaledMMLinearKernel):
    """Convert FP8 activations and weights to the model's dtype and multiply them.

    The weights are converted once, after they are loaded, so they occupy as much memory as those of an unquantized
    model. In bfloat16, sums are rounded before the scales are applied, and again afterwards. float32 would avoid
    the first rounding, but float32 products add in another order for other numbers of tokens, so drafts changed most
    answers (17 of 24).
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return whether vLLM computes on a CPU, with the reason if it does not."""
        return current_platform.is_cpu(), "requires a CPU"

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Return whether no scale applies to a block of values, with the reason if one does."""
        shapes = (c.activation_quant_key.scale.group_shape, c.weight_quant_key.scale.group_shape)
        has_blocks = any(shape.row > 0 and shape.col > 0 for shape in shapes)
        return not has_blocks, "does not support blocks"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Convert the layer's weights [inputs, outputs] to the model's dtype."""
        name = self.layer_param_names[0]
        weight = getattr(layer, name).to(self.config.out_dtype)
        replace_parameter(layer, name, torch.nn.Parameter(weight, requires_grad=False))

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list,
    ) -> torch.Tensor:
        """Return A @ B times both scales, plus the bias.

        Args:
            A: [tokens, inputs], FP8.
            B: [inputs, outputs], converted.
            out_dtype: dtype of the result and of B.
            As: scales of A, one or [tokens, 1].
            Bs: scales of B, one or [outputs, 1].
            bias: [outputs].
            output_shape: shape of the result, [..., outputs].
        """
        # Scales after the product: they are constant along the summed axis, and codes are exact in `out_dtype`.
        output = (A.to(out_dtype) @ B).float() * As * Bs.t()
        if bias is not None:
            output = output + bias
        return output.to(out_dtype).view(output_shape)


def install() -> None:
    """Register the kernel instead of `SLOW_KERNELS`. May be called repeatedly."""
    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "")
    names = disabled.split(",") if disabled else []
    if not set(SLOW_KERNELS) <= set(names):
        os.environ["VLLM_DISABLED_KERNELS"] = ",".join([*names, *SLOW_KERNELS])
    # vLLM selects the first kernel that supports a layer, so kernels that are registered twice are used once.
    register_linear_kernel(ConvertedFP8LinearKernel, PlatformEnum.CPU, "fp8")
