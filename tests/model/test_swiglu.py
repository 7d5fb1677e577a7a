from functools import partial

import pytest
import torch
import torch.nn.functional as F

from swiftlite.model.layers.swiglu import GeGLU, SwiGLU


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
