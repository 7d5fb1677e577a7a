"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2's attention, a softmax router without bias, and a gated shared expert.

They were published without MTP heads.
"""

from dataclasses import replace

from swiftlite.families import dense
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import MixtureOfExperts, Mlp
from swiftlite.families.models import qwen3_moe
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving

SHARED_EXPERT = {"mlp.shared_experts.": "mlp.shared_expert."}
"""Names of the shared expert's tensors, within a layer."""
_CLASSES = PluginClasses(
    "Qwen2MoeForCausalLM",
    layer="qwen2_moe:Qwen2MoeDecoderLayer",
    expert_matrices=("gate_proj", "up_proj", "down_proj"),
)
# transformers' defaults are the sizes of Qwen1.5-MoE-A2.7B.
_STATED = ("num_experts", "num_key_value_heads")


def _check(hf_config: HfConfig) -> None:
    problems = dense.missing_numbers(hf_config, _STATED)
    # Engines always have these biases. If qkv_bias is null, transformers has none.
    problems += dense.problems_of(hf_config, qkv_bias=(True,))
    problems += shared_expert_problems(hf_config)
    problems += qwen3_moe.mixture_problems(hf_config)
    dense.refuse(hf_config, problems)


def shared_expert_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem (one line) if the size of the shared expert is missing or 0."""
    key = "shared_expert_intermediate_size"
    if hf_config.get(key) == 0:
        return [f"{key} 0 is not supported: the model has a shared expert"]
    return dense.missing_numbers(hf_config, [key])


def mlp(hf_config: HfConfig, number: int) -> Mlp | MixtureOfExperts:
    """Return the MLP of decoder layer `number` (from 0): a mixture of experts with a gated shared expert, or dense."""
    kind = qwen3_moe.mlp(hf_config, number)
    if isinstance(kind, MixtureOfExperts):
        return replace(kind, shared_ffn=hf_config["shared_expert_intermediate_size"], shared_gate=True)
    return kind


def _layer(hf_config: HfConfig, number: int) -> Layer:
    return Layer(dense.attention(hf_config, qkv_bias=True), mlp(hf_config, number), SHARED_EXPERT)


QWEN2_MOE = dense.family(
    name="qwen2_moe",
    check=_check,
    layer=_layer,
    serving=Serving(
        vllm=vllm.plugin(replace(_CLASSES, trunk="qwen2_moe:Qwen2MoeForCausalLM")),
        sglang=sglang.plugin(_CLASSES),
    ),
    tiny={
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": False,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
)
