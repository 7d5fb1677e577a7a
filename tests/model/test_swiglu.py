from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from swiftlite.model.layers.swiglu import ClampedSwiGLU, GeGLU, SquaredReLU, SwiGLU, limited_swiglu


def check_gradient(found: torch.Tensor, ours: torch.Tensor, function: Callable) -> None:
    """Check that the gradient of `found` with respect to `ours` is that of a function in float64, to a rounding."""
    gradient = torch.randn_like(found)
    (grad,) = torch.autograd.grad(found, ours, gradient)
    exact = ours.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(function(exact), exact, gradient.double())
    rounding = torch.finfo(ours.dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(grad.double(), expected, rtol=0, atol=4 * rounding)


@pytest.mark.parametrize("activation", [SwiGLU, GeGLU, ClampedSwiGLU, SquaredReLU, limited_swiglu(7.0)])
def test_megatron_accepts_only_modules_that_save_themselves(activation):
    """`apply_module` (typed_torch.py of 0.17) requires a module, and MLP.sharded_state_dict of 0.16.1 this method."""
    module: Any = activation(None)
    assert issubclass(activation, torch.nn.Module)
    assert module.sharded_state_dict("mlp.activation_func.", (), None) == {} == module.state_dict()


@pytest.mark.parametrize(
    ("gated", "activation"), [(SwiGLU, F.silu), (GeGLU, partial(F.gelu, approximate="tanh"))], ids=["silu", "gelu"]
)
def test_values_and_gradients_are_autograds_to_the_bit(gated, activation):
    torch.manual_seed(0)
    ours = torch.randn(5, 3, 16, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    gate, up = theirs.chunk(2, dim=-1)
    expected = activation(gate) * up
    found = gated(None)(ours)
    assert torch.equal(found, expected)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_activation_of_gpt_oss(dtype):
    """The values are those of transformers to the bit, the gradients those of autograd in float64 to a rounding."""
    torch.manual_seed(0)
    ours = (torch.randn(7, 5, 32) * 5).to(dtype)
    ours[0, 0, :4] = torch.tensor([7.0, -7.0, 7.0, 7.0])  # at the limits
    assert (ours.abs() > 7).any()
    ours.requires_grad_()
    experts = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=1))
    found = ClampedSwiGLU(None)(ours)
    assert torch.equal(found, experts._apply_gate(ours))
    check_gradient(found, ours, experts._apply_gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_limited_swiglu(dtype):
    """The values are those of transformers to the bit, the gradients those of autograd in float64 to a rounding."""
    torch.manual_seed(0)
    ours = (torch.randn(7, 5, 32) * 5).to(dtype)
    ours[0, 0, 16:20] = torch.tensor([3.0, -3.0, 3.0, 3.0])  # at the limits of up
    ours.requires_grad_()
    config = Step3p7TextConfig(hidden_size=8, moe_intermediate_size=8, n_routed_experts=1)
    experts = Step3p7Experts(config, swiglu_limit=3.0)
    found = limited_swiglu(3.0)(None)(ours)
    assert torch.equal(found, experts._apply_gate(ours))
    assert not torch.equal(found, SwiGLU(None)(ours))
    check_gradient(found, ours, experts._apply_gate)
