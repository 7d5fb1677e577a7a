"""What config.json says of rotary frequencies, where it makes none."""

import pytest
import torch

from swiftlite.errors import UserError
from swiftlite.model.rope import RotaryEmbedding

CONFIG = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("rope", "problem"),
    [
        (YARN | {"rope_type": "yran"}, "rope_type 'yran' is not known"),
        (YARN | {"rope_type": ["yarn"]}, "rope_type"),
        (YARN | {"factor": "a"}, "no rotary frequencies follow from it"),
        (YARN | {"attention_factor": float("inf")}, "are not finite"),
        (YARN | {"beta_fast": "b"}, "no rotary frequencies follow from it"),
        ({"rope_type": "default", "rope_theta": 0.0}, "are not finite"),
        ({"rope_type": "default", "rope_theta": "a"}, "no rotary frequencies follow from it"),
        ({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1, 2], "long_factor": [1, 2]}, "follow from it"),
        ("a", "no rotary frequencies follow from it"),
        ([1], "no rotary frequencies follow from it"),
    ],
)
def test_frequencies_that_do_not_exist_are_one_error(rope, problem):
    with pytest.raises(UserError, match=problem) as caught:
        RotaryEmbedding(CONFIG | {"rope_parameters": rope}, torch.device("cpu"), torch.float32)
    assert "config.json" in caught.value.problem
    assert "\n" not in caught.value.problem


def test_heads_need_not_divide_the_hidden_size():
    """GLM-4.5 has 96 heads of 128 and a hidden size of 5120."""
    wide = {"hidden_size": 5120, "num_attention_heads": 96, "head_dim": 128, "max_position_embeddings": 512}
    plain = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [11, 11, 10]}
    turns = RotaryEmbedding(wide | {"rope_parameters": plain}, torch.device("cpu"), torch.float32)([3])
    assert turns.shape == (2, 3, 1, 1, 128)
