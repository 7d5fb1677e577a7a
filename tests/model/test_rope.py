"""Test the rotary settings of config.json for which transformers computes no valid frequencies, and M-RoPE."""

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from swiftlite.base.errors import UserError
from swiftlite.model.attention import rope
from swiftlite.model.attention.rope import RotaryEmbedding
from swiftlite.model.layers.compiled import MAX_VERSIONS, compiled
from swiftlite.model.layers.kernels import modules_of
from swiftlite.plan.kernels import Kernels
from tests.messages import naming

CONFIG = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("parameters", "named", "is_made"),
    [
        (YARN | {"rope_type": "yran"}, "rope_type 'yran' yarn", True),
        (YARN | {"rope_type": ["yarn"]}, "rope_type", True),
        (YARN | {"factor": "a"}, "rope_parameters", False),
        (YARN | {"attention_factor": float("inf")}, "rope_parameters", True),
        (YARN | {"beta_fast": "b"}, "rope_parameters", False),
        ({"rope_type": "default", "rope_theta": 0.0}, "rope_parameters", True),
        ({"rope_type": "default", "rope_theta": "a"}, "rope_parameters", False),
        (
            {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1, 2], "long_factor": [1, 2]},
            "rope_parameters",
            False,
        ),
        ("a", "rope_parameters", False),
        ([1], "rope_parameters", False),
    ],
)
def test_frequencies_that_do_not_exist_are_one_error(parameters, named, is_made):
    """For some settings transformers raises an exception; for others, frequencies are not finite."""
    with pytest.raises(UserError, match=naming(named)) as caught:
        RotaryEmbedding(CONFIG | {"rope_parameters": parameters}, torch.device("cpu"), torch.float32)
    assert (caught.value.__cause__ is None) is is_made
    assert "config.json" in caught.value.problem
    assert "\n" not in caught.value.problem


def test_heads_need_not_divide_the_hidden_size():
    """GLM-4.5 has 96 heads of size 128 and a hidden size of 5120."""
    wide = {"hidden_size": 5120, "num_attention_heads": 96, "head_dim": 128, "max_position_embeddings": 512}
    plain = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [11, 11, 10]}
    turns = RotaryEmbedding(wide | {"rope_parameters": plain}, torch.device("cpu"), torch.float32)([3])
    assert turns.shape == (2, 3, 1, 1, 128)


THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}


def interleaved_of_transformers(axes_3BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    config: Any = Qwen3VLTextConfig.from_dict(CONFIG | {"rope_parameters": THREE_AXES | {"mrope_interleaved": True}})
    return Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1), axes_3BS)


def in_a_row_of_transformers(axes_3BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    config: Any = Qwen2_5_VLTextConfig.from_dict(CONFIG | {"rope_parameters": dict(THREE_AXES)})
    return Qwen2_5_VLRotaryEmbedding(config)(torch.zeros(1), axes_3BS)


@pytest.mark.parametrize(
    ("of_transformers", "is_interleaved"), [(interleaved_of_transformers, True), (in_a_row_of_transformers, False)]
)
def test_turns_along_three_axes_are_those_of_transformers(of_transformers, is_interleaved):
    """Results are bitwise identical. If all three positions are equal, results equal those of ordinary positions."""
    parameters = THREE_AXES | {"mrope_interleaved": is_interleaved}
    turns = RotaryEmbedding(CONFIG | {"rope_parameters": parameters}, torch.device("cpu"), torch.float32)
    axes_3BS = torch.randint(0, 40, (3, 2, 37), generator=torch.Generator().manual_seed(0))
    cosine, sine = turns.at(axes_3BS).squeeze(3).transpose(1, 2)
    expected_cosine, expected_sine = of_transformers(axes_3BS)
    assert torch.equal(cosine, expected_cosine)
    assert torch.equal(sine[..., 16:], expected_sine[..., 16:])
    assert torch.equal(sine[..., :16], -expected_sine[..., :16])
    equal = turns.at(torch.arange(37).expand(3, 2, -1))
    assert torch.equal(equal, turns([37]).expand_as(equal))


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, "mrope_section"),
        (THREE_AXES | {"mrope_section": [6, 5, 4]}, "mrope_section 16"),
        (THREE_AXES | {"mrope_section": "a"}, "mrope_section"),
        (THREE_AXES | {"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic'"),
    ],
)
def test_three_axes_that_config_json_does_not_share_out_are_an_error(parameters, named):
    turns = RotaryEmbedding(CONFIG | {"rope_parameters": parameters}, torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match=naming(named)):
        turns.at(torch.zeros(3, 1, 4, dtype=torch.int64))


@pytest.mark.parametrize("has_norm", [False, True])
def test_few_versions_of_the_rotation_are_compiled(has_norm, monkeypatch):
    """Queries and keys, one row or several, and gradients on or off require 8 versions, for any number of lengths.

    If shapes were fixed, torch's limit of 8 versions would be reached, and torch would stop compiling.
    """
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    function: Any = rope.norm_and_rotate if has_norm else rope.rotate
    static, others = ((3, 1, 1), (1e-6, False)) if has_norm else ((3, 1), ())
    fused, weight = compiled(function, static=static), torch.ones(32)
    with torch.compiler.set_stance("default"):
        for length, num_rows in ((24, 2), (64, 2), (57, 2), (200, 1), (1000, 1)):
            turns = torch.randn(2, length, 1, 1, 32)
            for num_heads in (8, 2):
                for learns in (True, False):
                    channels = torch.randn(length, num_rows, num_heads, 32, requires_grad=learns)
                    tensors = (channels, weight, turns) if has_norm else (channels, turns)
                    assert torch.equal(fused(*tensors, *others), function(*tensors, *others))
    assert 0 < counter.frame_count <= 10


@pytest.mark.parametrize("is_zero_centered", [False, True])
@pytest.mark.parametrize("num_rotary", [32, 16])
def test_norm_and_rotation_in_one_function(is_zero_centered, num_rotary):
    """Values and gradients are those of the norm, then the rotation, in float64; in bfloat16 they are rounded once."""
    channels = torch.randn(9, 2, 4, 32, dtype=torch.float64)
    weight = torch.randn(32, dtype=torch.float64) * 0.1 + 1
    turns = torch.randn(2, 9, 1, 1, num_rotary, dtype=torch.float64)

    def separate(channels, weight):
        normed = channels * torch.rsqrt(channels.square().mean(-1, keepdim=True) + 1e-6)
        return rope.rotate(normed * (weight + is_zero_centered), turns)

    inputs = channels.float().requires_grad_(), weight.float().requires_grad_()

    def together(channels, weight, turns):
        return rope.norm_and_rotate(channels, weight, turns, 1e-6, is_zero_centered)

    ours = together(*inputs, turns.float())
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = separate(*exact_inputs)
    upstream = torch.randn_like(exact)
    # float32: sums of 32 and of 72 x 32 terms of about 1.
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=4e-6)
    found = torch.autograd.grad(ours, inputs, upstream.float())
    expected = torch.autograd.grad(exact, exact_inputs, upstream)
    for gradient, exact_gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=0, atol=2e-5)
    rounded = channels.bfloat16(), weight.bfloat16(), turns.bfloat16()
    in_bfloat16 = together(*rounded)
    channels, weight, turns = (tensor.float() for tensor in rounded)
    wide = together(channels, weight, turns)
    assert torch.equal(in_bfloat16, wide.bfloat16())


def test_a_fused_model_may_keep_more_versions_than_torch_would():
    with torch._dynamo.config.patch(recompile_limit=8):
        modules_of(Kernels(is_fused=True))
        assert torch._dynamo.config.recompile_limit == MAX_VERSIONS
