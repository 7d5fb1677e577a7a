"""Qwen3-VL (dense): the layers of Qwen3 and a vision tower, some of whose features are added behind the first layers.

The settings of the language model are under `text_config` in config.json. The published models have no MTP heads.
"""

from dataclasses import replace

from swiftlite.families import dense
from swiftlite.families.architecture import Outside
from swiftlite.families.family import HfConfig
from swiftlite.families.models.qwen3 import QWEN3
from swiftlite.families.serving import vllm
from swiftlite.families.serving.convention import PluginClasses, Serving
from swiftlite.families.vision import Qwen3Vision


def _check(hf_config: HfConfig) -> None:
    problems = dense.problems_of(hf_config, attention_bias=(False, None))
    dense.refuse(hf_config, problems + dense.base_problems(hf_config))


def _outside(hf_config: HfConfig) -> Outside:
    return dense.in_wrapper(dense.outside(hf_config))


QWEN3_VL = replace(
    QWEN3,
    name="qwen3_vl",
    check=_check,
    outside=_outside,
    vision=Qwen3Vision.of,
    language_model=(dense.IN_WRAPPER, "lm_head.", "mtp."),
    serving=Serving(
        vllm=vllm.plugin(
            PluginClasses(
                "Qwen3VLForConditionalGeneration",
                trunk="qwen3_vl:Qwen3VLForConditionalGeneration",
                layer="qwen3:Qwen3DecoderLayer",
                draft_base="ImageDraft",
            )
        )
    ),
)
