"""OLMo 2: norms only behind attention and MLP, and one norm each for the queries and the keys of all heads together."""

from dataclasses import replace

from swiftlite.families import dense
from swiftlite.families.architecture import Outside
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving


def _check(hf_config: HfConfig) -> None:
    problems = dense.problems_of(hf_config, attention_bias=(False, None))
    problems += dense.base_problems(hf_config)
    dense.refuse(hf_config, problems)


def _layer(hf_config: HfConfig, number: int) -> Layer:
    attention = replace(dense.attention(hf_config, qk_norm=True), qk_norm_is_joint=True)
    return Layer(attention, dense.mlp(hf_config), has_input_norms=False, has_output_norms=True)


def _outside(hf_config: HfConfig) -> Outside:
    return replace(dense.outside(hf_config), norms_round_last=True, rotary_rounds_last=True)


OLMO2 = dense.family(
    name="olmo2",
    check=_check,
    layer=_layer,
    outside=_outside,
    serving=Serving(
        vllm=vllm.plugin(PluginClasses("Olmo2ForCausalLM", trunk=vllm.TRANSFORMERS)),
        sglang=sglang.plugin(PluginClasses("Olmo2ForCausalLM", layer="Olmo2Layer")),
    ),
)
