"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: a Llama with fused tensors in files: queries, keys and values, and gate and up.

All layers have the same sliding window. Windows of `max_position_embeddings` or more tokens contain all tokens of valid
rows. In longer rows, of which runs warn, they are not applied.
"""

from dataclasses import replace

from swiftlite.families import dense, windows
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving

_NO_DROPOUT = (0, None)
_ROPE_TYPES = (None, "default", "longrope")


def _check(hf_config: HfConfig) -> None:
    problems = dense.problems_of(
        hf_config,
        reads=("partial_rotary_factor",),
        attention_bias=(False, None),
        mlp_bias=(False, None),
        lm_head_bias=(False, None),
        resid_pdrop=_NO_DROPOUT,
        embd_pdrop=_NO_DROPOUT,
    )
    # The default factor is 1, as in other programs.
    if dense.partial_rotary_factor(hf_config) is not None:
        problems += dense.partial_rotary_problems(hf_config)
    rope = dense.rope_parameters(hf_config)
    rope_type = rope.get("rope_type", rope.get("type"))
    if rope_type not in _ROPE_TYPES:
        problems.append(f"rope_parameters: rope_type {rope_type!r} is not supported; it can only be 'longrope'")
    dense.refuse(hf_config, problems + windows.common_window_problems(hf_config))


def _layer(hf_config: HfConfig, number: int) -> Layer:
    return Layer(
        replace(dense.attention(hf_config, window=windows.common_window(hf_config)), hf_is_fused=True),
        replace(dense.mlp(hf_config), hf_is_fused=True),
    )


PHI3 = dense.family(
    name="phi3",
    check=_check,
    layer=_layer,
    serving=Serving(
        vllm=vllm.plugin(
            PluginClasses(
                "Phi3ForCausalLM", trunk="phi3:Phi3ForCausalLM", layer="llama:LlamaDecoderLayer", is_fused=True
            )
        ),
        sglang=sglang.plugin(
            PluginClasses(
                "Phi3ForCausalLM",
                trunk="llama:Phi3ForCausalLM",
                trunk_base="NoWindowTrunk",
                layer="llama:LlamaDecoderLayer",
                is_fused=True,
            )
        ),
    ),
)
