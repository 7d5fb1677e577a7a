"""Kimi-K2 and K2.5: the layers of DeepSeek-V3. The published models have no MTP heads.

K2.5, K2.6 and K2.7 are vision-language models.
"""

from dataclasses import replace

from swiftlite.families.models.deepseek_v3 import DEEPSEEK_V3
from swiftlite.families.serving import vllm
from swiftlite.families.serving.convention import Serving
from swiftlite.families.wrapped import wrapped

_TRUNK = "swiftlite.engines.transformers.language_models:deepseek_v3"
KIMI_K2 = replace(
    DEEPSEEK_V3,
    name="kimi_k2",
    serving=replace(
        DEEPSEEK_V3.serving, vllm=vllm.next_layer("DeepSeekMTP", model_type="deepseek_v3"), transformers=_TRUNK
    ),
)
KIMI_K25 = wrapped(DEEPSEEK_V3, "kimi_k25", Serving(transformers=_TRUNK))
