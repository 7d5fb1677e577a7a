"""Qwen3 (dense): norms on queries and keys per head, and no biases. `attention_bias` is not supported."""

from functools import partial

from swiftlite.families import dense
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving

_CLASSES = PluginClasses("Qwen3ForCausalLM", trunk="qwen3:Qwen3ForCausalLM", layer="qwen3:Qwen3DecoderLayer")

QWEN3 = dense.family(
    name="qwen3",
    check=partial(dense.check, attention_bias=(False, None)),
    layer=partial(dense.layer, qk_norm=True),
    serving=Serving(
        vllm=vllm.plugin(_CLASSES),
        sglang=sglang.plugin(_CLASSES),
        llamacpp="glm4moe",
    ),
)
