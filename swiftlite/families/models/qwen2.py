"""Qwen2 and Qwen2.5: q, k and v always have biases, independent of config.json, as in transformers."""

from functools import partial

from swiftlite.families import dense
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving

_CLASSES = PluginClasses("Qwen2ForCausalLM", trunk="qwen2:Qwen2ForCausalLM", layer="qwen2:Qwen2DecoderLayer")

QWEN2 = dense.family(
    name="qwen2",
    check=dense.check,
    layer=partial(dense.layer, qkv_bias=True),
    serving=Serving(
        vllm=vllm.plugin(_CLASSES),
        sglang=sglang.plugin(_CLASSES),
        llamacpp="glm4moe",
    ),
)
