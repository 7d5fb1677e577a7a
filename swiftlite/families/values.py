"""Define valid values of config.json keys for all families, so that estimates can rely on them.

Missing and null keys are not checked: families define which keys they require and which settings they support.
"""

from collections.abc import Mapping
from typing import Any

from swiftlite.base.errors import clip
from swiftlite.base.heads import DEPTH_KEY, QWEN3_5_DEPTH_KEY, UNROLL_KEY
from swiftlite.families.drafters import drafter_problems

# Bounds of integers: the maximum is about ten times the largest value of any published model. A larger value is an
# error: a list of 1e9 layers, or an embedding of 1e9 tokens, would use all memory before it is reported.
_SIZES = {
    "vocab_size": (1, 10_000_000),
    "hidden_size": (1, 200_000),
    "intermediate_size": (1, 1_000_000),
    "num_hidden_layers": (1, 1_000),
    "num_attention_heads": (1, 2_000),
    "num_key_value_heads": (1, 2_000),
    "head_dim": (1, 10_000),
    "max_position_embeddings": (1, 10**9),
    "sliding_window": (0, 10**9),
    "num_experts": (1, 5_000),
    "num_local_experts": (1, 5_000),
    "n_routed_experts": (1, 5_000),
    "num_experts_per_tok": (1, 5_000),
    "moe_intermediate_size": (1, 1_000_000),
    "n_shared_experts": (0, 1_000),
    "num_shared_experts": (0, 1_000),
    "expert_hidden_dim": (1, 1_000_000),
    "moe_num_experts": (1, 5_000),
    "moe_top_k": (1, 5_000),
    "share_expert_dim": (1, 1_000_000),
    "num_attention_groups": (1, 2_000),
    "moe_k": (1, 5_000),
    "moe_num_shared_experts": (0, 1_000),
    "moe_layer_start_index": (0, 1_000),
    "moe_layer_end_index": (-1, 1_000),
    "moe_layer_interval": (1, 1_000),
    "n_group": (1, 5_000),
    "topk_group": (1, 5_000),
    "first_k_dense_replace": (0, 1_000),
    "decoder_sparse_step": (1, 1_000),
    "q_lora_rank": (1, 200_000),
    "kv_lora_rank": (1, 200_000),
    "qk_nope_head_dim": (1, 10_000),
    "qk_rope_head_dim": (1, 10_000),
    "v_head_dim": (1, 10_000),
    "rotary_dim": (1, 10_000),
    "swa_num_attention_heads": (1, 2_000),
    "swa_num_key_value_heads": (1, 2_000),
    "swa_head_dim": (1, 10_000),
    "swa_v_head_dim": (1, 10_000),
    "sliding_window_size": (1, 10**9),
    "global_head_dim": (1, 10_000),
    "num_global_key_value_heads": (1, 2_000),
    "top_k_experts": (1, 5_000),
    "hidden_size_per_layer_input": (0, 10_000),
    "vocab_size_per_layer_input": (0, 10_000_000),
    "num_kv_shared_layers": (0, 1_000),
    "index_topk": (1, 10**9),
    "index_topk_freq": (1, 1_000),
    "index_skip_topk_offset": (1, 1_000),
    "index_n_heads": (1, 2_000),
    "index_head_dim": (1, 10_000),
    "shared_expert_intermediate_size": (0, 1_000_000),
    "full_attention_interval": (1, 1_000),
    "no_rope_layer_interval": (1, 1_000),
    "linear_num_key_heads": (1, 2_000),
    "linear_num_value_heads": (1, 2_000),
    "linear_key_head_dim": (1, 10_000),
    "linear_value_head_dim": (1, 10_000),
    "linear_conv_kernel_dim": (2, 100),
    "attention_head_dim": (1, 10_000),
    "conv_kernel": (2, 100),
    "mamba_head_dim": (1, 10_000),
    "mamba_num_heads": (1, 5_000),
    "moe_latent_size": (1, 200_000),
    "moe_shared_expert_intermediate_size": (1, 1_000_000),
    "n_groups": (1, 5_000),
    "ssm_state_size": (1, 10_000),
    DEPTH_KEY: (0, 100),
    QWEN3_5_DEPTH_KEY: (0, 100),
    UNROLL_KEY: (0, 1_000),
}
_NUMBERS = {
    "rms_norm_eps": (0.0, 1.0),
    "layer_norm_epsilon": (0.0, 1.0),
    "initializer_range": (0.0, 1e6),
    "rope_theta": (1e-6, 1e30),
    "swa_rope_theta": (1e-6, 1e30),
    "attention_value_scale": (1e-6, 1e6),
    "layernorm_epsilon": (0.0, 1.0),
    "partial_rotary_factor": (1e-6, 1.0),
    "routed_scaling_factor": (1e-6, 1e6),
    "attention_multiplier": (1e-6, 1e6),
    "query_pre_attn_scalar": (1e-6, 1e6),
    "rope_local_base_freq": (1e-6, 1e30),
    "embedding_multiplier": (1e-6, 1e6),
    "logits_scaling": (1e-6, 1e6),
    "residual_multiplier": (1e-6, 1e6),
    "router_scaling_factor": (1e-6, 1e6),
    "moe_router_scaling_factor": (1e-6, 1e6),
    "final_logit_softcapping": (1e-6, 1e6),
    "factor": (1e-6, 1e6),
    "original_max_position_embeddings": (1, 10**9),
    "attention_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
}
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "mrope": (),
    "proportional": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""Types of rotary embeddings, each with the keys that it requires in the rotary settings."""
_FLAGS = (
    "attention_k_eq_v",
    "enable_moe_block",
    "use_double_wide_mlp",
    "add_swa_attention_sink_bias",
    "add_full_attention_sink_bias",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_qk_norm",
    "use_routing_bias",
    "norm_topk_prob",
    "qk_norm",
    "route_norm",
    "rope_interleave",
    "use_sliding_window",
    "qkv_bias",
    "use_bias",
)
_LISTS = {
    "mlp_only_layers": int,
    "no_rope_layers": int,
    "layer_types": str,
    "hybrid_layer_pattern": int,
    "mlp_layer_types": str,
    "indexer_types": str,
    "layers_block_type": str,
    "mtp_layers_block_type": str,
}
_OBJECTS = ("rope_parameters", "rope_scaling", "per_layer_config")


def value_problems(hf_config: Mapping[str, Any], by_layer: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return a problem (one line) for every key whose value no model can have.

    Args:
        by_layer: `Family.numbers_by_layer`.
    """
    problems = []
    for key, (lowest, highest) in _SIZES.items():
        value = hf_config.get(key)
        if value is not None and not (_is_whole(value) and lowest <= value <= highest):
            problems.append(f"{key} {_shown(value)} is not an integer from {lowest} to {highest}")
    problems += _number_problems(hf_config, by_layer)
    for key in _FLAGS:
        if not isinstance(hf_config.get(key), bool | None):
            problems.append(f"{key} {_shown(hf_config[key])} is not true or false")
    for key, kind in _LISTS.items():
        value = hf_config.get(key)
        is_list = isinstance(value, list) and all(isinstance(entry, kind) for entry in value)
        if value is not None and not is_list:
            kind_of_entries = "names" if kind is str else "integers"
            problems.append(f"{key} {_shown(value)} is not a list of {kind_of_entries}")
    for key in _OBJECTS:
        value = hf_config.get(key)
        if isinstance(value, dict):
            problems += [f"{key}: {problem}" for problem in _number_problems(value, {})]
        elif value is not None:
            problems.append(f"{key} {_shown(value)} is not an object")
    return problems + drafter_problems(hf_config)


def rope_problems(settings: Mapping[str, Any]) -> list[str]:
    """Return a problem (one line) for every rotary setting with which no frequencies can be computed.

    Args:
        settings: rope_parameters or rope_scaling of one kind of layer.
    """
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        return [f"rope_type {_shown(rope_type)} is unknown; known: {', '.join(sorted(ROPE_TYPES))}"]
    problems = _number_problems(settings, {})
    if nested := [key for key, value in settings.items() if isinstance(value, dict)]:
        problems.append(f"{_shown(nested[0])} has settings of its own, which this family does not support")
    for key in ROPE_TYPES[rope_type]:
        if settings.get(key) is None:
            problems.append(f"{key} is missing, which rope_type {rope_type!r} requires")
        elif rope_type == "longrope" and not isinstance(settings[key], list):
            problems.append(f"{key} {_shown(settings[key])} is not a list")
    return problems


def _number_problems(values: Mapping[str, Any], by_layer: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return a problem (one line) for every key with a value that is not a number, or too small or too large.

    Args:
        by_layer: lowest and highest number of keys that can have lists of numbers.
    """
    problems = []
    for key, (lowest, highest) in {**_NUMBERS, **by_layer}.items():
        value = values.get(key)
        for number in value if key in by_layer and isinstance(value, list) else [value]:
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if number is not None and not (is_number and lowest <= number <= highest):
                problems.append(f"{key} {_shown(number)} is not a number from {lowest:g} to {highest:g}")
                break
    return problems


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return clip(repr(value), 80)
