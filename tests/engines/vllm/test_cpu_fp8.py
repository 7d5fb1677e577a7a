"""Test the kernel for FP8 on a CPU against vLLM's own kernels, which compute with torch._scaled_mm."""

import importlib.util
import os

import pytest
import torch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
TOKENS, INPUTS, OUTPUTS = 5, 96, 48
ROUNDING = {
    # another order of summation: each of two sums of INPUTS products is off by at most INPUTS roundings
    torch.float32: 2 * INPUTS * torch.finfo(torch.float32).eps,
    # sums are rounded twice, those of vLLM's kernel once; each time by at most half of eps
    torch.bfloat16: 1.5 * torch.finfo(torch.bfloat16).eps,
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Remove what `install` adds to the environment after each test."""
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "SomeKernel")


def keys(scheme: str):
    """Return the keys of activations and of weights."""
    from vllm.model_executor.layers.quantization.utils import quant_utils as utils

    if scheme == "channels":
        return utils.kFp8DynamicTokenSym, utils.kFp8StaticTokenSym
    if scheme == "tensor":
        return utils.kFp8StaticTensorSym, utils.kFp8StaticTensorSym
    return utils.kFp8Dynamic128Sym, utils.kFp8Static128BlockSym


def make_config(scheme: str, dtype: torch.dtype = torch.float32):
    from vllm.model_executor.kernels.linear import FP8ScaledMMLinearLayerConfig

    activations, weights = keys(scheme)
    return FP8ScaledMMLinearLayerConfig(
        weight_quant_key=weights,
        activation_quant_key=activations,
        input_dtype=dtype,
        out_dtype=dtype,
        weight_shape=(OUTPUTS, INPUTS),
    )


def make_layer(scheme: str) -> torch.nn.Module:
    """Return a layer with random weights [INPUTS, OUTPUTS] as vLLM's kernels expect them after loading."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Module()
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator).to(torch.float8_e4m3fn).t()
    scale = torch.rand(OUTPUTS, 1, generator=generator) if scheme == "channels" else torch.tensor(0.7)
    layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    layer.register_parameter("weight_scale", torch.nn.Parameter(scale, requires_grad=False))
    layer.register_buffer("input_scale", None if scheme == "channels" else torch.tensor(0.01))
    layer.register_buffer("input_scale_ub", None)
    return layer


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scheme", ["channels", "tensor"])
def test_results_are_those_of_scaled_mm(scheme, has_bias, dtype):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.linear.scaled_mm import pytorch as kernels

    from swiftlite.engines.vllm.cpu_fp8 import SLOW_KERNELS, ConvertedFP8LinearKernel

    slow = getattr(kernels, SLOW_KERNELS[1 if scheme == "channels" else 0])
    names = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2, TOKENS, INPUTS, generator=generator).to(dtype)
    bias = torch.randn(OUTPUTS, generator=generator).to(dtype) if has_bias else None
    results = []
    with set_current_vllm_config(VllmConfig()):
        for kernel_class in (slow, ConvertedFP8LinearKernel):
            layer = make_layer(scheme)
            kernel = kernel_class(make_config(scheme, dtype), names)
            kernel.process_weights_after_loading(layer)
            results.append(kernel.apply_weights(layer, inputs, bias))
    expected, found = results
    assert found.shape == expected.shape == (2, TOKENS, OUTPUTS)
    assert found.dtype == expected.dtype == dtype
    difference = (found.float() - expected.float()).abs().max()
    assert difference <= ROUNDING[dtype] * expected.abs().max()


def test_vllm_selects_the_kernel_except_for_blocks():
    from vllm.model_executor.kernels import linear

    from swiftlite.engines.vllm import cpu_fp8

    cpu_fp8.install()
    cpu_fp8.install()
    names = os.environ["VLLM_DISABLED_KERNELS"].split(",")
    assert names == ["SomeKernel", *cpu_fp8.SLOW_KERNELS]  # the user's choice is kept

    chosen = linear.choose_scaled_mm_linear_kernel(
        make_config("channels"), linear._POSSIBLE_FP8_KERNELS, quantization="fp8_w8a8"
    )
    assert chosen is cpu_fp8.ConvertedFP8LinearKernel
    assert not cpu_fp8.ConvertedFP8LinearKernel.can_implement(make_config("blocks"))[0]
