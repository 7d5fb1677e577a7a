"""GLM-4.5 and 4.6: grouped-query attention, experts, and MTP heads.

Half of the channels of each head are rotary. The router uses sigmoids and is balanced by a bias. There are shared
experts, and the first layers are dense.
"""

from dataclasses import replace

from swiftlite.base.drafting import Drafting
from swiftlite.families import dense, moe
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import Convention, Serving


def _check(hf_config: HfConfig) -> None:
    problems = dense.problems_of(hf_config, reads=("partial_rotary_factor",))
    problems += moe.mixture_problems(hf_config)
    dense.refuse(hf_config, problems + dense.partial_rotary_problems(hf_config))


def _layer(hf_config: HfConfig, number: int) -> Layer:
    # In transformers, attention_bias applies only to q, k and v, unlike in Llama and Qwen3.
    qkv_bias, qk_norm = bool(hf_config.get("attention_bias")), bool(hf_config.get("use_qk_norm"))
    return Layer(dense.attention(hf_config, qkv_bias=qkv_bias, qk_norm=qk_norm), moe.mlp(hf_config, number))


HEADS = replace(moe.NEXT_LAYER_HEADS, drafting=Drafting(recycles_before_norm=True, zeroes_first_embedding=True))

GLM4_MOE = dense.family(
    name="glm4_moe",
    check=_check,
    layer=_layer,
    mtp=HEADS,
    serving=Serving(
        vllm=vllm.next_layer("Glm4MoeMTP"),
        sglang=Convention("Glm4MoeForCausalLMNextN", "one", block=sglang.DECODER),
        llamacpp="glm4moe",
    ),
    tiny={
        **moe.TINY,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "num_nextn_predict_layers": 0,
    },
)
