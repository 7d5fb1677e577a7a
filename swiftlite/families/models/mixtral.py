"""Mixtral: Mistral's attention, experts in all layers, and a softmax router without bias.

It was published without MTP heads. Published models have no sliding window, which vLLM 0.32 ignores here, and SGLang
0.5.23 reads only the base of rotary embeddings.
"""

from dataclasses import replace

from swiftlite.families import dense, moe
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving

_EXPERTS = ("num_local_experts", "num_experts_per_tok")
_MATRICES = ("w1", "w3", "w2")
_CLASSES = PluginClasses(
    "MixtralForCausalLM",
    trunk="mixtral:MixtralForCausalLM",
    layer="mixtral:MixtralDecoderLayer",
    expert_matrices=_MATRICES,
)


def _check(hf_config: HfConfig) -> None:
    problems = dense.missing_numbers(hf_config, (*_EXPERTS, "num_key_value_heads"))  # transformers' are Mixtral-8x7B's
    problems += dense.problems_of(
        hf_config,
        rope_scaling=(None,),
        router_jitter_noise=(0, None),
        sliding_window=(None,),
        tie_word_embeddings=(False, None),  # ignored by SGLang
    )
    if (kind := dense.rope_parameters(hf_config).get("rope_type", "default")) != "default":
        problems.append(f"rope_parameters: rope_type {kind!r} is not supported; it can only be 'default'")
    if not problems:
        problems += moe.topk_problems(hf_config, "num_local_experts")
    dense.refuse(hf_config, problems)


def _layer(hf_config: HfConfig, number: int) -> Layer:
    mixture = moe.experts_of(
        hf_config,
        "num_local_experts",
        ffn="intermediate_size",
        hf_matrices=_MATRICES,
        hf_ffn="intermediate_size",
        router={
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": False,  # the selected probabilities are divided by their sum
            "moe_router_dtype": "fp32",  # weights of experts are not rounded, as in transformers and engines
            "moe_router_load_balancing_type": "aux_loss",
        },
    )
    return Layer(dense.attention(hf_config), mixture, {"mlp.": "block_sparse_moe."})


MIXTRAL = dense.family(
    name="mixtral",
    check=_check,
    layer=_layer,
    memory_names={"block_sparse_moe.": "mlp."},
    serving=Serving(
        vllm=vllm.plugin(_CLASSES),
        sglang=sglang.plugin(replace(_CLASSES, trunk_base="SharingTrunk")),
    ),
    tiny={"num_local_experts": 4, "num_experts_per_tok": 2},
)
