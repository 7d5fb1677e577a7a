"""Seed-OSS: a Llama with biases on q, k and v (`attention_bias`); other biases are not supported.

The dropout of 0.1 in the published config.json does not change logits, and is not applied in training.
"""

from swiftlite.families import dense
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving

# The defaults in transformers are true, 128 and 8.
_STATED = ("attention_bias", "head_dim", "num_key_value_heads")
_NO_BIAS = (False, None)
_DROPOUT = (0, 0.1, None)


def _check(hf_config: HfConfig) -> None:
    problems = dense.problems_of(
        hf_config,
        attention_out_bias=_NO_BIAS,
        mlp_bias=_NO_BIAS,
        attention_dropout=_DROPOUT,
        residual_dropout=_DROPOUT,
    )
    dense.refuse(hf_config, [f"{key} is missing" for key in _STATED if key not in hf_config] + problems)


def _layer(hf_config: HfConfig, number: int) -> Layer:
    return dense.layer(hf_config, number, qkv_bias=bool(hf_config.get("attention_bias")))


SEED_OSS = dense.family(
    name="seed_oss",
    check=_check,
    layer=_layer,
    serving=Serving(
        # The inputs of transformers' classes have three dimensions, the kernel's two.
        vllm=vllm.plugin(PluginClasses("SeedOssForCausalLM", trunk=vllm.TRANSFORMERS), lacks_amx_int8=True),
        sglang=sglang.plugin(PluginClasses("SeedOssForCausalLM", layer="qwen2:Qwen2DecoderLayer")),
        llamacpp="glm4moe",
    ),
    # Published with 0.1 of both: what tests train with transformers' layers would be noise.
    tiny={"attention_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0},
)
