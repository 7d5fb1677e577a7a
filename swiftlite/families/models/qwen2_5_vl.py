"""Qwen2.5-VL: the layers of Qwen2 and a vision tower. The published models have no MTP heads.

In published files, the names of the tower's tensors start with `visual.`, and those of the language model are Qwen2's.
Files that transformers saves since 4.52 have the names of other vision-language models.
"""

from dataclasses import replace

from swiftlite.families import dense
from swiftlite.families.architecture import Outside
from swiftlite.families.family import HfConfig
from swiftlite.families.models.qwen2 import QWEN2
from swiftlite.families.serving import vllm
from swiftlite.families.serving.convention import PluginClasses, Serving
from swiftlite.families.vision import Qwen2_5Vision


def _check(hf_config: HfConfig) -> None:
    dense.refuse(hf_config, dense.problems_of(hf_config) + dense.base_problems(hf_config))


def _renamed_outside(hf_config: HfConfig) -> Outside:
    return dense.in_wrapper(dense.outside(hf_config))


def _renamed_vision(hf_config: HfConfig) -> Qwen2_5Vision:
    return replace(Qwen2_5Vision.of(hf_config), hf_prefix="model.visual.")


QWEN2_5_VL = replace(
    QWEN2,
    name="qwen2_5_vl",
    check=_check,
    vision=Qwen2_5Vision.of,
    language_model=("model.", "lm_head.", "mtp."),
    serving=Serving(
        vllm=vllm.plugin(
            PluginClasses(
                "Qwen2_5_VLForConditionalGeneration",
                trunk="qwen2_5_vl:Qwen2_5_VLForConditionalGeneration",
                layer="qwen2:Qwen2DecoderLayer",
                draft_base="ImageDraft",
            )
        )
    ),
)
QWEN2_5_VL = replace(
    QWEN2_5_VL,
    renamed=replace(
        QWEN2_5_VL,
        outside=_renamed_outside,
        vision=_renamed_vision,
        language_model=(dense.IN_WRAPPER, "lm_head.", "mtp."),
    ),
)
