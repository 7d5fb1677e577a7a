"""The activations of gated MLPs."""

from typing import Any

import torch
import torch.nn.functional as F


class SwiGLU:
    """silu(gate) * up, where gate and up are concatenated in the last dimension.

    megatron-core's function also adds an offset to up, which is 0 for the models here. The addition takes one more pass
    and stores one more tensor for the backward pass (transformer/mlp.py:225 of 0.16.1).
    """

    def __init__(self, config: Any):
        """Accept the argument with which megatron-core builds the module; it is not used."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Map [..., 2 * ffn] to [..., ffn]."""
        product = _SwiGLU.apply(gate_up)
        assert product is not None
        return product


class GeGLU:
    """gelu(gate) * up with the tanh approximation, where gate and up are concatenated in the last dimension."""

    def __init__(self, config: Any):
        """Accept the argument with which megatron-core builds the module; it is not used."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Map [..., 2 * ffn] to [..., ffn]."""
        product = _GeGLU.apply(gate_up)
        assert product is not None
        return product


class _SwiGLU(torch.autograd.Function):
    """SwiGLU with a backward pass that writes the gradients of gate and up into one tensor.

    Autograd would concatenate the two gradients afterwards, which takes one more pass over the widest tensor of a
    layer.
    """

    @staticmethod
    def forward(ctx, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> torch.Tensor:
        gate_up, activated = ctx.saved_tensors
        (grad_output,) = grad_outputs
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad_output, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_output * up, gate, grad_input=grad_gate)
        return grad_gate_up


class _GeGLU(torch.autograd.Function):
    """GeGLU with a backward pass like that of `_SwiGLU`."""

    @staticmethod
    def forward(ctx, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.gelu(gate, approximate="tanh")
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> torch.Tensor:
        gate_up, activated = ctx.saved_tensors
        (grad_output,) = grad_outputs
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad_output, activated, out=grad_up)
        grad_gate.copy_(torch.ops.aten.gelu_backward(grad_output * up, gate, approximate="tanh"))
        return grad_gate_up
