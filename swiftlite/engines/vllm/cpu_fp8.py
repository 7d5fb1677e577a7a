"""A kernel of vLLM for linear layers in FP8 on a CPU.

On most CPUs vLLM 0.32 computes FP8 layers without blocks by `torch._scaled_mm`, whose CPU implementation is a plain loop:
24 tokens times a matrix of 576 x 3072 took 1.9 s on a Xeon with AMX, and 5 ms by the kernel below. Both multiply the same
values, because float32 represents each FP8 value exactly; only the order of the sums differs.
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


class Float32FP8LinearKernel(FP8ScaledMMLinearKernel):
    """Multiply activations and weights in FP8, after converting both to float32.

    The weights are converted once, when they are loaded, so they occupy four bytes each.
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
        """Convert the layer's weights [inputs, outputs] to float32."""
        name = self.layer_param_names[0]
        weight = getattr(layer, name).float()
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
            B: [inputs, outputs], float32.
            out_dtype: dtype of the result.
            As: scales of A, one or [tokens, 1].
            Bs: scales of B, one or [outputs, 1].
            bias: [outputs].
            output_shape: shape of the result, [..., outputs].
        """
        output = (A.float() @ B) * As * Bs.t()
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
    register_linear_kernel(Float32FP8LinearKernel, PlatformEnum.CPU, "fp8")
