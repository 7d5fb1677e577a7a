import torch
import torch.nn.functional as F

from swiftlite.model.layers.swiglu import SwiGLU


def test_values_and_gradients_are_autograds_to_the_bit():
    torch.manual_seed(0)
    ours = torch.randn(5, 3, 16, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    gate, up = theirs.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    found = SwiGLU(None)(ours)
    assert torch.equal(found, expected)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
