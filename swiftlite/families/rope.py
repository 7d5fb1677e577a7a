"""Define the keys of a config.json that determine the rotary frequencies.

`model/attention/rope.py` computes the frequencies.
"""

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
