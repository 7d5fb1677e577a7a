"""Test the experts and the router, and the defects of megatron-core's router."""

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from swiftlite.data.batch import collate
from swiftlite.data.sample import make_sample
from swiftlite.model.forward import forward
from swiftlite.model.layers.router import TopKRouter
from swiftlite.model.loss.balance import RoutedTokens
from tests.model.test_logits import load_megatron
from tests.tiny import make_tiny_hf

BIAS = torch.tensor([0.1, 0.1001, 0.1002, 0.1003])  # one number in bfloat16


@pytest.fixture
def router(tmp_path, mesh) -> torch.nn.Module:
    model = load_megatron(make_tiny_hf(tmp_path, "glm4_moe"), mesh, torch.float32)
    return model.decoder.layers[1].get_submodule("mlp.router")


def test_casts_leave_bias_and_counts_alone(router):
    assert isinstance(router, TopKRouter)
    router.get_buffer("expert_bias").copy_(BIAS)
    router.bfloat16()
    assert router.get_parameter("weight").dtype is torch.bfloat16
    assert torch.equal(router.get_buffer("expert_bias"), BIAS)
    counts = router.get_buffer("local_tokens_per_expert")
    counts += 256
    counts += 1
    assert counts.tolist() == [257.0] * 4


def test_buffers_follow_to_another_device(router):
    assert router.to("meta").get_buffer("expert_bias").is_meta


def test_z_loss_is_the_mean_over_tokens_without_padding(router, monkeypatch):
    """The sums of all gradients are divided by `divisor` at the end of a step."""
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.ones(1))  # as schedules set it
    router.config.moe_z_loss_coeff, divisor = 0.3, 7
    is_real = torch.tensor([[True, True], [True, False], [False, True]])
    number = int(is_real.sum())
    router.tokens = RoutedTokens(is_real.long() - 1, 1, mean_weight=1 / number, divisor=divisor)
    logits = torch.randn(6, 4, requires_grad=True)
    router.train().apply_z_loss(logits).sum().backward()
    squares = torch.log(torch.exp(logits).sum(dim=1)) ** 2
    (expected,) = torch.autograd.grad(0.3 * squares[is_real.flatten()].mean(), logits)
    assert logits.grad is not None
    torch.testing.assert_close((logits.grad - 1) / divisor, expected)
    assert router.eval().apply_z_loss(logits) is logits


def test_forced_load_is_random(router):
    tokens = torch.randn(64, 1, 64)
    with torch.no_grad():
        assert torch.equal(router(tokens)[1], router(tokens)[1])
        router.config.moe_router_force_load_balancing = True
        first, second = router(tokens)[1], router(tokens)[1]
    assert not torch.equal(first, second)
    assert first.sum() == second.sum() == 64 * 2


def test_a_step_counts_tokens_and_reaches_every_weight(tmp_path, mesh):
    model = load_megatron(make_tiny_hf(tmp_path, "glm4_moe", depth=1), mesh, torch.float32).train()
    samples = [make_sample(np.random.RandomState(0).randint(0, 128, length), np.ones(length)) for length in (16, 11)]
    losses = forward(model, collate(samples, pad_token_id=0, num_drafts=1))
    losses.main.loss_BS.sum().backward()
    counts = model.decoder.layers[1].get_submodule("mlp.router").get_buffer("local_tokens_per_expert")
    assert counts.sum() == (16 + 11) * 2  # tokens without padding x experts per token
    for name, parameter in model.decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
