"""DeepSeek-V3 and R1: latent attention, sigmoid-routed experts behind a few dense layers, published with MTP heads."""

from typing import Any

from swiftlite.bridge.rows import Row
from swiftlite.families import dense
from swiftlite.families.family import HfConfig
from swiftlite.model.rope import ROPE_KEYS, rope_config


def attention_config(hf_config: HfConfig) -> dict[str, Any]:
    """What latent attention adds to the keyword arguments, or changes in them."""
    hf_rope = {key: hf_config[key] for key in ROPE_KEYS if key in hf_config}
    hf_rope["head_dim"] = hf_config["qk_rope_head_dim"]
    rope_parameters = rope_config(hf_rope).rope_parameters or {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": hf_config.get("q_lora_rank"),
        "kv_lora_rank": hf_config["kv_lora_rank"],
        "qk_head_dim": hf_config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf_config["qk_rope_head_dim"],
        "v_head_dim": hf_config["v_head_dim"],
        "kv_channels": hf_config["v_head_dim"],
        "num_query_groups": hf_config["num_attention_heads"],
        "hf_rope": hf_rope,
        "rope_interleave": hf_config.get("rope_interleave", True),
        # The softmax scale: megatron-core's defaults are those of one model.
        "rope_type": "rope",
        "rotary_scaling_factor": rope_parameters.get("factor") or 1.0,
        "mscale_all_dim": rope_parameters.get("mscale_all_dim") or 0.0,
    }


def attention_rows(hf_config: HfConfig) -> list[Row]:
    """Latent attention of one layer."""
    hidden, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    q_rank, rank = hf_config.get("q_lora_rank"), hf_config["kv_lora_rank"]
    nope, rope, value = (hf_config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query, latents = heads * (nope + rope), rank + rope
    rows = [
        Row("self_attention.linear_kv_down_proj.weight", {"self_attn.kv_a_proj_with_mqa.weight": (latents, hidden)}),
        Row("self_attention.kv_layernorm.weight", {"self_attn.kv_a_layernorm.weight": (rank,)}),
        Row("self_attention.linear_kv_up_proj.weight", {"self_attn.kv_b_proj.weight": (heads * (nope + value), rank)}),
        Row("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": (hidden, heads * value)}),
    ]
    if q_rank is None:
        return [Row("self_attention.linear_q_proj.weight", {"self_attn.q_proj.weight": (query, hidden)}), *rows]
    return [
        Row("self_attention.linear_q_down_proj.weight", {"self_attn.q_a_proj.weight": (q_rank, hidden)}),
        Row("self_attention.q_layernorm.weight", {"self_attn.q_a_layernorm.weight": (q_rank,)}),
        Row("self_attention.linear_q_up_proj.weight", {"self_attn.q_b_proj.weight": (query, q_rank)}),
        *rows,
    ]


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Keyword arguments of megatron-core's MLATransformerConfig."""
    return dense.transformer_config(hf_config) | attention_config(hf_config)
