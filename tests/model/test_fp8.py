"""Test the products of linear layers in FP8 without Transformer Engine against products of decoded factors."""

from typing import Any

import pytest
import torch

from swiftlite.args.fields import DistributedArgs
from swiftlite.families.resolved import resolve
from swiftlite.model.layers import fp8
from swiftlite.model.open import open_model
from swiftlite.plan.kernels import Kernels
from swiftlite.plan.low_precision import LowPrecision
from swiftlite.train.optim import wrap_model
from tests.tiny import make_tiny_hf

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
KINDS = {
    "rowwise": LowPrecision("hybrid", "rowwise", is_local=True),
    "tensorwise": LowPrecision("hybrid", "tensorwise", is_local=True),
    "rowwise e4m3": LowPrecision("e4m3", "rowwise", is_local=True),
}


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "glm4_moe", "deepseek_v3"])
def hf_model(request, tmp_path_factory):
    """Models with norms of queries and keys, with biases, with experts, and with latent attention."""
    sizes: dict[str, Any] = SIZES if request.param.startswith("qwen") else {"num_hidden_layers": 4}
    return resolve(make_tiny_hf(tmp_path_factory.mktemp("model"), request.param, depth=1, **sizes))


def open_with(hf_model, mesh, low: LowPrecision | None) -> Any:
    (model,), _ = open_model(hf_model, mesh, dtype=torch.bfloat16, kernels=Kernels(low_precision=low))
    return model


def decoded(tensor: torch.Tensor, dtype: torch.dtype, recipe: str) -> torch.Tensor:
    """Return a matrix, rounded as its FP8 codes, in float64."""
    largest = tensor.abs().amax(-1, keepdim=True) if recipe == "rowwise" else tensor.abs().max()
    scale = largest.float() / torch.finfo(dtype).max
    return (tensor.float() / scale).to(dtype).double() * scale.double()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance from a float64 matrix that is rounded to bfloat16 once, relative to its length."""
    expected = expected.bfloat16().double()
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_multiplies_decoded_factors(hf_model, mesh, kind):
    """Outputs and gradients of inputs are those of the decoded factors, gradients of weights those in bfloat16."""
    low, random = KINDS[kind], torch.Generator().manual_seed(0)
    model = open_with(hf_model, mesh, low).train()
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, fp8._Fp8Linear)
    }
    assert {name.split(".")[2] for name in layers if name.startswith("decoder")} == {"1", "2"}
    for name, layer in layers.items():
        size_out, size_in = layer.weight.shape
        input = torch.randn(24, 2, size_in, generator=random).bfloat16().requires_grad_()
        gradient = 1e-4 * torch.randn(24, 2, size_out, generator=random).bfloat16()
        output, _ = layer(input)
        output.backward(gradient)
        assert input.grad is not None
        weight = layer.weight.detach()
        expected = decoded(input.detach().flatten(0, 1), E4M3, low.recipe) @ decoded(weight, E4M3, low.recipe).t()
        if getattr(layer, "bias", None) is not None:
            expected = expected.bfloat16() + layer.bias.detach()
        assert difference(output.flatten(0, 1), expected) < 1e-3, name
        of_gradients = E5M2 if low.format == "hybrid" else E4M3
        expected = decoded(gradient.flatten(0, 1), of_gradients, low.recipe) @ decoded(weight.t(), E4M3, low.recipe).t()
        assert difference(input.grad.flatten(0, 1), expected) < 1e-3, name
        expected = gradient.double().flatten(0, 1).t() @ input.detach().double().flatten(0, 1)
        assert difference(layer.weight.grad, expected) < 1e-3, name


def test_the_other_layers_and_evaluation_compute_in_bfloat16(hf_model, mesh):
    low, plain = (open_with(hf_model, mesh, kind) for kind in (KINDS["rowwise"], None))
    kept = {name for name, module in low.named_modules() if isinstance(module, fp8._Fp8Linear)}
    assert {name.split(".")[0] for name in kept} == {"decoder", "mtp"}
    assert not [name for name in kept if ".local_experts." in name or "down_proj" in name]
    assert any(name.startswith("mtp.") and name.endswith("eh_proj") for name in kept)
    assert low.state_dict().keys() == plain.state_dict().keys()
    layer, other = low.decoder.layers[1].mlp, plain.decoder.layers[1].mlp
    input = torch.randn(5, 1, hf_model.config["hidden_size"]).bfloat16()
    with torch.no_grad():
        assert torch.equal(layer.eval()(input)[0], other.eval()(input)[0])
        assert not torch.equal(layer.train()(input)[0], other.train()(input)[0])


@pytest.mark.parametrize("in_bf16", [False, True])
def test_gradients_are_added_to_main_grad(mesh, tmp_path, in_bf16):
    """With `main_grad` in bfloat16, the layer adds its gradient itself, as with float32 on a GPU."""
    hf_model = resolve(make_tiny_hf(tmp_path, "qwen3", **SIZES))
    model = open_with(hf_model, mesh, KINDS["rowwise"])
    (wrapped,) = wrap_model([model], mesh, torch.bfloat16, DistributedArgs(grad_reduce_in_bf16=in_bf16))
    wrapped.zero_grad_buffer()
    layer = model.decoder.layers[1].mlp.linear_fc1
    inputs, gradients = torch.randn(2, 6, 1, 64).bfloat16(), torch.randn(2, 6, 1, layer.weight.size(0)).bfloat16()
    expected = torch.zeros(layer.weight.shape, dtype=torch.float64)
    for input, gradient in zip(inputs, gradients, strict=True):
        layer(input)[0].backward(gradient)
        expected += gradient[:, 0].double().t() @ input[:, 0].double()
    # Of two micro-batches; the gradient of each is rounded to bfloat16, or their sum twice.
    assert float((layer.weight.main_grad.double() - expected).norm() / expected.norm()) < 3e-3
    assert layer.weight.main_grad.dtype is (torch.bfloat16 if in_bf16 else torch.float32)


@pytest.mark.parametrize("quantize", [fp8.quantize_rows, fp8.quantize])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_of_small_large_and_broken_values(quantize, dtype):
    """Zeros stay zero, gradients of any size keep their digits, and a NaN or an infinity is not lost."""
    for factor in (1e-25, 1e-6, 1.0, 1e20):
        tensor = (factor * torch.randn(4, 32)).bfloat16()
        codes, scale = quantize(tensor, dtype)
        error = codes.double() * scale.double() - tensor.double()
        assert error.norm() < 0.12 * tensor.double().norm()  # half of the last of 2 or 3 mantissa bits
    codes, scale = quantize(torch.zeros(2, 16).bfloat16(), dtype)
    assert (codes.float() * scale == 0).all()
    for broken in (float("nan"), float("inf")):
        codes, scale = quantize(torch.tensor([[1.0, broken]]).bfloat16(), dtype)
        assert not (codes.float() * scale).isfinite().all()
