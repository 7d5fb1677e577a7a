"""DeepSeek-V3 and R1: latent attention, and the mixture and MTP heads that GLM-4.5 took over from it.

What transformers takes for granted where config.json is silent are the numbers of the one model of 671 billion
parameters, so the keys that decide must be there.
"""

from typing import Any

from swiftlite.bridge.rows import Row
from swiftlite.families import dense, moe
from swiftlite.families.family import Family, HfConfig
from swiftlite.families.rope_config import ROPE_KEYS, rope_config

_REQUIRED = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
    "n_shared_experts",
    "routed_scaling_factor",
    "norm_topk_prob",
)


def _check(hf_config: HfConfig) -> None:
    problems = dense.missing_numbers(hf_config, _REQUIRED)
    if "q_lora_rank" not in hf_config:
        problems.append("q_lora_rank is missing; it is null in models without a query latent")
    if not problems:
        problems += dense.problems_of(
            # Where it is stated, it is the rotary part; where not, the hidden size need not divide into heads.
            {"head_dim": hf_config["qk_rope_head_dim"], **hf_config},
            head_dim=(hf_config["qk_rope_head_dim"],),
            attention_bias=(False, None),
            num_key_value_heads=(hf_config.get("num_attention_heads"), None),
            moe_layer_freq=(1, None),
            scoring_func=("sigmoid",),
            topk_method=("noaux_tc",),
        )
        problems += moe.mixture_problems(hf_config)
    dense.refuse(hf_config, problems)


def _transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    return dense.transformer_config(hf_config) | attention_config(hf_config) | moe.mixture_config(hf_config)


def _layer_rows(hf_config: HfConfig, layer: int) -> list[Row]:
    if moe.is_moe_layer(hf_config, layer):
        mlp = moe.mixture_rows(hf_config)
    else:
        mlp = dense.mlp_rows("mlp.", hf_config["hidden_size"], hf_config["intermediate_size"])
    return [*attention_rows(hf_config), *dense.norm_rows(hf_config), *mlp]


def attention_config(hf_config: HfConfig) -> dict[str, Any]:
    """What latent attention adds to the keyword arguments of megatron-core's config, or changes in them."""
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


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    check=_check,
    transformer_config=_transformer_config,
    layer_rows=_layer_rows,
    outer_rows=dense.outer_rows,
    mtp=moe.NEXT_LAYER_HEADS,
    is_derived=dense.is_derived,
)
