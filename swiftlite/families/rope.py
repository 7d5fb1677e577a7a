"""The keys of a config.json that determine the rotary frequencies, which `model/attention/rope.py` computes."""

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
"""Keys of a config that transformers' init functions read; all families use these names."""
