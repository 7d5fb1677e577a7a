"""Test RMSNorm, plain and fused, against float64."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.model.layers.norm import FusedRMSNorm, RMSNorm
from swiftlite.model.layers.residual import ResidualRMSNorm

SIZE = 300  # not a power of 2


def norms(*, is_zero_centered: bool) -> tuple[RMSNorm, FusedRMSNorm]:
    config = TransformerConfig(num_layers=1, hidden_size=SIZE, num_attention_heads=4, params_dtype=torch.bfloat16)
    config.layernorm_zero_centered_gamma = is_zero_centered
    return RMSNorm(config, SIZE), FusedRMSNorm(config, SIZE)


def exact_norm(hidden: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    wide = hidden.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * factor.double()


def test_a_zero_centered_weight_is_not_rounded_before_one_is_added():
    """bfloat16 has only 128 numbers between 1 and 2, so 1 + w would lose most digits of weights near 0.

    The error of the fused norm is that of the plain norm, which equals transformers. With 1 + w in bfloat16 it would be
    three times as large.
    """
    plain, fused = norms(is_zero_centered=True)
    weight = (torch.randn(SIZE) * 0.05).bfloat16()
    hidden = torch.randn(400, SIZE, dtype=torch.bfloat16)
    exact = exact_norm(hidden, 1 + weight.double())
    errors = []
    for norm in (plain, fused):
        norm.weight.data = weight
        errors.append(float((norm(hidden).detach().double() - exact).norm() / exact.norm()))
    assert errors[1] <= errors[0]
    rounded = torch.nn.functional.rms_norm(hidden, weight.shape, 1.0 + weight, 1e-5)
    assert float((rounded.double() - exact).norm() / exact.norm()) > 1.3 * errors[0]


def test_a_small_update_of_a_zero_centered_weight_changes_the_output():
    _, fused = norms(is_zero_centered=True)
    hidden = torch.ones(1, SIZE, dtype=torch.bfloat16) * 1.5
    fused.weight.data = torch.full((SIZE,), 0.0078, dtype=torch.bfloat16)
    before = fused(hidden.float())
    fused.weight.data = torch.full((SIZE,), 0.0088, dtype=torch.bfloat16)
    assert float((fused(hidden.float()) - before).mean()) == pytest.approx(0.001, rel=0.05)  # bfloat16's 8 bits of w


@pytest.mark.parametrize("is_zero_centered", [False, True])
def test_gradients_of_the_fused_norm(is_zero_centered):
    _, fused = norms(is_zero_centered=is_zero_centered)
    fused.weight.data = torch.randn(SIZE) * 0.05 + 1
    hidden = torch.randn(7, SIZE, requires_grad=True)
    upstream = torch.randn(7, SIZE)
    found = torch.autograd.grad(fused(hidden), (hidden, fused.weight), upstream)
    wide, weight = hidden.detach().double().requires_grad_(), fused.weight.detach().double().requires_grad_()
    expected = torch.autograd.grad(exact_norm(wide, weight + is_zero_centered), (wide, weight), upstream.double())
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()) * 10)


@pytest.mark.parametrize("is_zero_centered", [False, True])
@pytest.mark.parametrize("learns_weight", [False, True])
def test_a_norm_with_its_residual_connection(is_zero_centered, learns_weight):
    """Sum, norm and gradients equal those of separate operations, in float64."""
    config = TransformerConfig(num_layers=1, hidden_size=SIZE, num_attention_heads=4, params_dtype=torch.bfloat16)
    config.layernorm_zero_centered_gamma = is_zero_centered
    norm = ResidualRMSNorm(config, SIZE)
    norm.weight.data = torch.randn(SIZE) * 0.05 + 1
    norm.weight.requires_grad_(learns_weight)
    hidden, added = (torch.randn(7, 3, SIZE, requires_grad=True) for _ in range(2))
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, added, norm.weight)]
    for first in (hidden, None):  # the norm before attention adds nothing
        inputs, exact_inputs = [added, norm.weight][: 1 + learns_weight], wide[1 : 2 + learns_weight]
        found = norm(added) if first is None else norm(first, added)
        total = wide[1]
        if first is not None:
            inputs, exact_inputs, total = [hidden, *inputs], [wide[0], *exact_inputs], wide[0] + wide[1]
        expected = total * 1.0, exact_norm(total, wide[2] + is_zero_centered)
        upstream = [torch.randn(7, 3, SIZE) for _ in range(2)]
        found += torch.autograd.grad(found, inputs, upstream)
        expected += torch.autograd.grad(expected, exact_inputs, [tensor.double() for tensor in upstream])
        assert len(found) == len(expected)
        for ours, exact in zip(found, expected, strict=True):
            # Sums of 300 channels or 21 tokens in float32.
            torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-5 * float(exact.detach().abs().max()))
