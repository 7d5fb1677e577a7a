"""The activations of MLPs, as modules: from 0.17 on, megatron-core accepts nothing else (`apply_module`)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from swiftlite.model.copied_config import with_settings


@dataclass(frozen=True)
class _Activation:
    """An activation and its derivative.

    Attributes:
        forward: maps the gate to the activated gate.
        backward: given the gradient of the activated gate, the gate, and a tensor; writes the gate's gradient into it.
    """

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def _silu_backward(grad_activated: torch.Tensor, gate: torch.Tensor, grad_gate: torch.Tensor) -> None:
    torch.ops.aten.silu_backward.grad_input(grad_activated, gate, grad_input=grad_gate)


def _gelu(gate: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh")


def _gelu_backward(grad_activated: torch.Tensor, gate: torch.Tensor, grad_gate: torch.Tensor) -> None:
    grad_gate.copy_(torch.ops.aten.gelu_backward(grad_activated, gate, approximate="tanh"))


_SILU = _Activation(F.silu, _silu_backward)
_GELU = _Activation(_gelu, _gelu_backward)


class _ActivationModule(nn.Module):
    """A module without parameters, built as megatron-core does. `config` is not used."""

    def __init__(self, config: Any):
        super().__init__()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return nothing to save. megatron-core's MLP calls this method of all its modules (mlp.py:260 of 0.16.1)."""
        return {}


class SwiGLU(_ActivationModule):
    """silu(gate) * up, where gate and up are concatenated in the last dimension.

    megatron-core's function also adds an offset to up, which is 0 for the models here. The addition takes one more pass
    and stores one more tensor for the backward pass (transformer/mlp.py:225 of 0.16.1).
    """

    activation = _SILU

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Map [..., 2 * ffn] to [..., ffn]."""
        return _GatedProduct.apply(gate_up, self.activation)  # type: ignore[return-value]


class GeGLU(SwiGLU):
    """gelu(gate) * up with the tanh approximation, where gate and up are concatenated in the last dimension."""

    activation = _GELU


class SquaredReLU(_ActivationModule):
    """The square of relu, for MLPs without a gate."""

    def forward(self, up: torch.Tensor) -> torch.Tensor:
        """Map [..., ffn] to [..., ffn]."""
        return F.relu(up).square()


class _GatedProduct(torch.autograd.Function):
    """activation(gate) * up with a backward pass that writes the gradients of gate and up into one tensor.

    Autograd would concatenate the two gradients afterwards, which takes one more pass over the widest tensor of a
    layer.
    """

    @staticmethod
    def forward(ctx, gate_up: torch.Tensor, activation: _Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = activation.forward(gate)
        ctx.save_for_backward(gate_up, activated)
        ctx.activation = activation
        return activated * up

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        gate_up, activated = ctx.saved_tensors
        (grad_output,) = grad_outputs
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad_output, activated, out=grad_up)
        ctx.activation.backward(grad_output * up, gate, grad_gate)
        return grad_gate_up, None


class ClampedSwiGLU(SwiGLU):
    """The activation of gpt-oss (`families/mlp.py`), where gate and up alternate in the last dimension."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _ClampedProduct.apply(gate_up)  # type: ignore[return-value]


ALPHA = 1.702
LIMIT = 7.0


class _ClampedProduct(torch.autograd.Function):
    """(up + 1) * gate * sigmoid(ALPHA * gate) of clamped inputs, with the order of operations of transformers.

    Only the input is saved. Autograd would save seven tensors.
    """

    @staticmethod
    def forward(ctx, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = _clamped(gate_up)
        return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        (grad_output,) = grad_outputs
        gate, up = _clamped(gate_up)
        share = torch.sigmoid(gate * ALPHA)
        # The derivative of g * s(a g), with the sigmoid s, is s * (1 + a g (1 - s)).
        grad_gate = grad_output * (up + 1) * share * (1 + ALPHA * gate * (1 - share))
        grad_up = grad_output * gate * share
        # At the limits, clamped inputs have a gradient, as in torch.
        grad_gate.masked_fill_(gate_up[..., 0::2] > LIMIT, 0)
        grad_up.masked_fill_(gate_up[..., 1::2].abs() > LIMIT, 0)
        return torch.stack([grad_gate, grad_up], dim=-1).flatten(-2)


def _clamped(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gate_up[..., 0::2].clamp(max=LIMIT), gate_up[..., 1::2].clamp(-LIMIT, LIMIT)


class LimitedSwiGLU(SwiGLU):
    """silu(gate) * up, where silu(gate) is at most `limit`, and up is between -limit and limit. Use `limited_swiglu`.

    It is not part of megatron-core's fused activation, so it requires a module of `limited_mlp.py`.
    """

    limit: ClassVar[float]

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _LimitedProduct.apply(gate_up, self.limit)  # type: ignore[return-value]


@cache
def limited_swiglu(limit: float) -> type[LimitedSwiGLU]:
    """Return the class of the activation with this limit; megatron-core's specs contain classes."""
    return type("LimitedSwiGLU", (LimitedSwiGLU,), {"limit": limit})


class _LimitedProduct(torch.autograd.Function):
    """The product of `LimitedSwiGLU`. Only the input is saved. Autograd would save five tensors."""

    @staticmethod
    def forward(ctx, gate_up: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.limit = limit
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        (grad_output,) = grad_outputs
        limit = ctx.limit
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        # At the limits, clamped inputs have a gradient, as in torch.
        grad_activated = (grad_output * up.clamp(-limit, limit)).masked_fill_(activated > limit, 0)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        _silu_backward(grad_activated, gate, grad_gate)
        # After the mask above, which needs the values that the clamp overwrites.
        torch.mul(grad_output, activated.clamp_(max=limit), out=grad_up)
        grad_up.masked_fill_(up.abs() > limit, 0)
        return grad_gate_up, None


def unfused(config: Any) -> Any:
    """Return a copy of megatron-core's config with which a module computes the activation of its spec, instead of
    megatron-core's fused one.
    """
    return with_settings(config, use_te_activation_func=True, bias_activation_fusion=False)
