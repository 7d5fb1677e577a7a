"""Mistral: Llama's layers without biases. All layers of Mistral 7B v0.1 have a sliding window of 4,096 tokens; later
models have none."""

from swiftlite.families import dense, windows
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving

_DEFAULT_WINDOW = 4096  # in transformers


def _check(hf_config: HfConfig) -> None:
    dense.refuse(hf_config, dense.problems_of(hf_config) + windows.common_window_problems(hf_config))


def _layer(hf_config: HfConfig, number: int) -> Layer:
    window = windows.common_window(hf_config, _DEFAULT_WINDOW)
    return Layer(dense.attention(hf_config, window=window), dense.mlp(hf_config))


MISTRAL = dense.family(
    name="mistral",
    check=_check,
    layer=_layer,
    serving=Serving(
        vllm=vllm.plugin(
            PluginClasses("MistralForCausalLM", trunk="mistral:MistralForCausalLM", layer="mistral:MistralDecoderLayer")
        ),
        sglang=sglang.plugin(
            PluginClasses(
                "MistralForCausalLM",
                trunk="mistral:MistralForCausalLM",
                trunk_base="NoWindowTrunk",
                layer="llama:LlamaDecoderLayer",
            )
        ),
        llamacpp="glm4moe",
    ),
    tiny={"sliding_window": None},
)
