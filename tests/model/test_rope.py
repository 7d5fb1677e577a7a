"""What config.json says of rotary frequencies, where it makes none."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from swiftlite.errors import UserError
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
    """Some cannot be made, others are made and are not finite."""
    with pytest.raises(UserError, match=naming(named)) as caught:
        RotaryEmbedding(CONFIG | {"rope_parameters": parameters}, torch.device("cpu"), torch.float32)
    assert (caught.value.__cause__ is None) is is_made
    assert "config.json" in caught.value.problem
    assert "\n" not in caught.value.problem


def test_heads_need_not_divide_the_hidden_size():
    """GLM-4.5 has 96 heads of 128 and a hidden size of 5120."""
    wide = {"hidden_size": 5120, "num_attention_heads": 96, "head_dim": 128, "max_position_embeddings": 512}
    plain = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [11, 11, 10]}
    turns = RotaryEmbedding(wide | {"rope_parameters": plain}, torch.device("cpu"), torch.float32)([3])
    assert turns.shape == (2, 3, 1, 1, 128)


def test_few_versions_of_the_rotation_are_compiled(monkeypatch):
    """For queries and keys, one row or several of any length, with gradients or without: 6, where compiling for fixed
    shapes reaches torch's limit of 8 and stops."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    rotation = compiled(rope.rotate)
    with torch.compiler.set_stance("default"):
        for length, num_rows in ((24, 2), (64, 2), (57, 3), (200, 1), (1000, 1)):
            turns = torch.randn(2, length, 1, 1, 32)
            for num_heads in (8, 2):
                for learns in (True, False):
                    channels = torch.randn(length, num_rows, num_heads, 32, requires_grad=learns)
                    assert torch.equal(rotation(channels, turns), rope.rotate(channels, turns))
    assert 0 < counter.frame_count < 8


def test_a_fused_model_may_keep_more_versions_than_torch_would():
    with torch._dynamo.config.patch(recompile_limit=8):
        modules_of(Kernels(is_fused=True))
        assert torch._dynamo.config.recompile_limit == MAX_VERSIONS
