"""Qwen1.5 and Qwen2 MoE: Qwen2's attention, the router that Qwen3 MoE kept, and one shared expert behind a gate;
published without MTP heads.
"""

from dataclasses import replace

from swiftlite.families import dense, qwen3_moe
from swiftlite.families.family import Family, HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import Mixture


def _check(hf_config: HfConfig) -> None:
    problems = dense.problems_of(hf_config, qkv_bias=(True, None)) + qwen3_moe.mixture_problems(hf_config)
    problems += dense.missing_numbers(hf_config, ["shared_expert_intermediate_size"])
    dense.refuse(hf_config, problems)


def _layer(hf_config: HfConfig, number: int) -> Layer:
    mlp = qwen3_moe.mlp(hf_config, number)
    if isinstance(mlp, Mixture):
        mlp = replace(mlp, shared_ffn=hf_config["shared_expert_intermediate_size"], shared_gate=True)
    hf_names = {"mlp.shared_experts.": "mlp.shared_expert."}
    return Layer(dense.attention(hf_config, qkv_bias=True), mlp, hf_names)


QWEN2_MOE = Family(
    name="qwen2_moe",
    check=_check,
    layer=_layer,
    outside=dense.outside,
    mtp=dense.QWEN3_NEXT_HEADS,
)
