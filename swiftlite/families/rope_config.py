"""The part of a config.json that fixes the rotary frequencies. Without megatron-core, so that families can read it."""

from typing import Any

from transformers import LlamaConfig

# What the init functions read of a config; every family of this repository spells them so.
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


def rope_config(hf_config: dict[str, Any]) -> LlamaConfig:
    """The rotary part of a config.json, normalised by transformers (legacy `rope_scaling` included)."""
    return LlamaConfig.from_dict({key: hf_config[key] for key in ROPE_KEYS if hf_config.get(key) is not None})
