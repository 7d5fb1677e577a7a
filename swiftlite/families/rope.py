"""Define the keys of a config.json that determine the rotary frequencies.

`model/attention/rope.py` computes the frequencies.
"""

import math
from collections.abc import Mapping
from typing import Any

ROPE_KEYS = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
)
"""Keys of a config that transformers' functions for rotary frequencies read. All families use these names."""


def has_default_scale(yarn: Mapping[str, Any]) -> bool:
    """Return whether YaRN settings have the default `attention_factor`, 0.1 * log(factor) + 1."""
    stated, factor = yarn.get("attention_factor"), yarn.get("factor")
    if stated is None or not (isinstance(factor, int | float) and factor > 0):
        return True
    return isinstance(stated, int | float) and math.isclose(stated, 0.1 * math.log(factor) + 1, rel_tol=1e-6)
