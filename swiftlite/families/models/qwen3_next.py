"""Qwen3-Next: three layers of linear attention for each layer of gated full attention, and experts.

Norms multiply by 1 + weight. The router is the router of Qwen3 MoE, and the gated shared expert that of Qwen2 MoE. See
also `linear_attention.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swiftlite.families import dense, moe
from swiftlite.families.architecture import Outside
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.linear_attention import GatedDeltaNet
from swiftlite.families.models import qwen2_moe, qwen3_moe
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import Convention, Serving

_LINEAR, _FULL = "linear_attention", "full_attention"
_NORMED = {"norm_topk_prob": True}  # default
_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def _check(hf_config: HfConfig) -> None:
    problems = hybrid_problems(hf_config)
    problems += qwen2_moe.shared_expert_problems(hf_config)
    dense.refuse(hf_config, problems + qwen3_moe.mixture_problems({**_NORMED, **hf_config}))


def hybrid_problems(hf_config: HfConfig, **neutral: tuple[Any, ...]) -> list[str]:
    """Return a problem (one line) for each unsupported setting of the layers.

    Args:
        neutral: further keys of the family, with their supported values, which must include the default.
    """
    problems = dense.missing_numbers(hf_config, (*_SIZES, "head_dim"))
    problems += dense.problems_of(
        hf_config,
        reads=("partial_rotary_factor",),
        layer_types=(_LINEAR, _FULL),
        attention_bias=(False, None),
        attn_output_gate=(True, None),
        **neutral,
    )
    problems += dense.partial_rotary_problems(hf_config)
    if problems:
        return problems
    kinds = layer_types(hf_config)
    if not kinds or kinds[-1] != _FULL:
        problems.append(f"layer_types must end with {_FULL!r}, the attention of the MTP heads")
    values, keys = hf_config["linear_num_value_heads"], hf_config["linear_num_key_heads"]
    if values % keys:
        problems.append(f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}")
    return problems


def layer_types(hf_config: HfConfig) -> Sequence[str]:
    """Return the kind of each layer. By default, every `full_attention_interval`-th layer has full attention."""
    stated = hf_config.get("layer_types")
    if stated is not None:
        return stated
    interval = hf_config.get("full_attention_interval") or 4
    numbers = range(1, hf_config["num_hidden_layers"] + 1)
    return [_LINEAR if number % interval else _FULL for number in numbers]


def attention(hf_config: HfConfig, number: int, *, hf_is_grouped: bool) -> GatedDeltaNet | GroupedQueryAttention:
    """Return the attention of decoder layer `number`, from 0."""
    if layer_types(hf_config)[number] == _FULL:
        return dense.attention(hf_config, qk_norm=True, output_gate=True)
    return GatedDeltaNet(
        hidden=hf_config["hidden_size"],
        key_heads=hf_config["linear_num_key_heads"],
        value_heads=hf_config["linear_num_value_heads"],
        key_head_dim=hf_config["linear_key_head_dim"],
        value_head_dim=hf_config["linear_value_head_dim"],
        kernel=hf_config["linear_conv_kernel_dim"],
        hf_is_grouped=hf_is_grouped,
    )


def _layer(hf_config: HfConfig, number: int) -> Layer:
    mlp = qwen2_moe.mlp({**_NORMED, **hf_config}, number)
    return Layer(attention(hf_config, number, hf_is_grouped=True), mlp, qwen2_moe.SHARED_EXPERT)


def outside(hf_config: HfConfig) -> Outside:
    """Return the modules outside of the layers, with norms that multiply by 1 + weight."""
    plain = dense.outside(hf_config)
    return replace(plain, mcore_config={**plain.mcore_config, "layernorm_zero_centered_gamma": True})


TINY_LINEAR = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
}
QWEN3_NEXT = dense.family(
    name="qwen3_next",
    check=_check,
    layer=_layer,
    outside=outside,
    norm_start=0.0,
    serving=Serving(
        # All heads share one projection and one set of norms.
        vllm=Convention("Qwen3NextMTP", "first", quantizes=vllm.FUSION),
        sglang=Convention("Qwen3NextForCausalLMMTP", "one", block=sglang.FIRST_LAYER),
        llamacpp="qwen3next",
    ),
    tiny={
        **moe.TINY,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        **TINY_LINEAR,
    },
)
