"""GLM-4.7-Flash: DeepSeek-V3's attention and experts, with MTP heads that engines run like GLM-4.5's.

transformers and swiftlite normalize the latents with an epsilon of 1e-6; vLLM and SGLang use `rms_norm_eps`, which is
1e-5 in GLM-4.7-Flash.

`mlp_layer_types` lists the dense layers; engines read `first_k_dense_replace`.
"""

from swiftlite.families import dense, moe
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.models import deepseek_v3, glm4_moe
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import Convention, Serving


def _check(hf_config: HfConfig) -> None:
    problems = deepseek_v3.problems_of(hf_config)
    if not problems:
        problems += moe.layer_type_problems(hf_config)
        if moe.num_dense_of_types(hf_config) >= hf_config["num_hidden_layers"]:
            problems.append("mlp_layer_types leaves no layer with experts")
    dense.refuse(hf_config, problems)


def _layer(hf_config: HfConfig, number: int) -> Layer:
    is_dense = number < moe.num_dense_of_types(hf_config)
    mlp = dense.mlp(hf_config) if is_dense else moe.mixture(hf_config)
    return Layer(deepseek_v3.attention(hf_config), mlp)


GLM4_MOE_LITE = dense.family(
    name="glm4_moe_lite",
    check=_check,
    layer=_layer,
    mtp=glm4_moe.HEADS,
    serving=Serving(
        vllm=vllm.next_layer("Glm4MoeLiteMTP"),
        sglang=Convention("Glm4MoeLiteForCausalLMNextN", "one", block=sglang.DECODER),
        llamacpp="deepseek2",
    ),
    tiny={
        **moe.TINY,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "topk_method": "noaux_tc",
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "rope_theta": 10000.0,
        "num_nextn_predict_layers": 0,
    },
)
