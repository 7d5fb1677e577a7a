"""DeepSeek-V3 and R1: latent attention, and the mixture of experts and MTP heads that GLM-4.5 also uses.

The defaults of transformers are the sizes of the 671B model. config.json must therefore contain all keys that determine
sizes.
"""

from typing import Any

from swiftlite.families import dense, moe
from swiftlite.families.attention import Indexer, LatentAttention
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.rope import ROPE_KEYS
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import Convention, Serving

_REQUIRED = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_group",
    "topk_group",
    "n_shared_experts",
    "routed_scaling_factor",
    "norm_topk_prob",
)


def _check(hf_config: HfConfig) -> None:
    dense.refuse(hf_config, dense.missing_numbers(hf_config, ["first_k_dense_replace"]) + problems_of(hf_config))


def problems_of(hf_config: HfConfig, **options: Any) -> list[str]:
    """Return a problem (one line) for every setting of attention and experts that is invalid or would be ignored.

    Args:
        options: further arguments of `dense.problems_of`.
    """
    problems = dense.missing_numbers(hf_config, _REQUIRED)
    if "q_lora_rank" not in hf_config:
        problems.append("q_lora_rank is missing; set it to null for a model without a query latent")
    if not problems:
        problems += dense.problems_of(
            # If head_dim is set, it is the size of the rotary part; otherwise heads need not divide the hidden size.
            {"head_dim": hf_config["qk_rope_head_dim"], **hf_config},
            head_dim=(hf_config["qk_rope_head_dim"],),
            attention_bias=(False, None),
            num_key_value_heads=(hf_config.get("num_attention_heads"), None),
            moe_layer_freq=(1, None),
            scoring_func=("sigmoid",),
            topk_method=("noaux_tc",),
            **options,
        )
        problems += moe.mixture_problems(hf_config)
    return problems


def _layer(hf_config: HfConfig, number: int) -> Layer:
    return Layer(attention(hf_config), moe.mlp(hf_config, number))


def attention(hf_config: HfConfig, indexer: Indexer | None = None) -> LatentAttention:
    """Return latent attention with the sizes of a config.json, and with this indexer."""
    hf_rope = {key: hf_config[key] for key in ROPE_KEYS if key in hf_config}
    hf_rope["head_dim"] = hf_config["qk_rope_head_dim"]
    return LatentAttention(
        hidden=hf_config["hidden_size"],
        heads=hf_config["num_attention_heads"],
        q_lora_rank=hf_config.get("q_lora_rank"),
        kv_lora_rank=hf_config["kv_lora_rank"],
        qk_nope_head_dim=hf_config["qk_nope_head_dim"],
        qk_rope_head_dim=hf_config["qk_rope_head_dim"],
        v_head_dim=hf_config["v_head_dim"],
        hf_rope=hf_rope,
        rope_interleave=hf_config.get("rope_interleave", True),
        indexer=indexer,
    )


DEEPSEEK_V3 = dense.family(
    name="deepseek_v3",
    check=_check,
    layer=_layer,
    mtp=moe.NEXT_LAYER_HEADS,
    serving=Serving(
        vllm=vllm.next_layer("DeepSeekMTP"),
        sglang=Convention("DeepseekV3ForCausalLMNextN", "one", block=sglang.DECODER),
        llamacpp="deepseek2",
    ),
    # Both choices are real: one of two groups, and two of its four experts. Value heads are smaller than key heads.
    tiny={
        **moe.TINY,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",  # these three are for vLLM and SGLang
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "rope_theta": 10000.0,
        },
        "num_nextn_predict_layers": 0,
    },
)
