"""Llama: the plain dense architecture. Its optional biases (`attention_bias`, `mlp_bias`) are not supported."""

from functools import partial

from swiftlite.families import dense
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving

_CLASSES = PluginClasses("LlamaForCausalLM", trunk="llama:LlamaForCausalLM", layer="llama:LlamaDecoderLayer")

LLAMA = dense.family(
    name="llama",
    check=partial(dense.check, attention_bias=(False, None), mlp_bias=(False, None)),
    layer=dense.layer,
    serving=Serving(
        vllm=vllm.plugin(_CLASSES),
        sglang=sglang.plugin(_CLASSES),
        llamacpp="glm4moe",
    ),
)
