"""Qwen3-VL, dense and with experts: the layers of Qwen3 or Qwen3 MoE and a vision tower, some of whose features are
added behind the first layers.

The settings of the language model are under `text_config` in config.json. The published models have no MTP heads.
Published files with experts have transposed stacks of all experts (`bridge/encoding/expert_stack.py`).
"""

from dataclasses import replace

from swiftlite.families import dense
from swiftlite.families.architecture import Outside
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.models import qwen3_moe
from swiftlite.families.models.qwen3 import QWEN3
from swiftlite.families.serving import vllm
from swiftlite.families.serving.convention import PluginClasses, Serving
from swiftlite.families.vision import Qwen3Vision


def _check(hf_config: HfConfig) -> None:
    problems = dense.problems_of(hf_config, attention_bias=(False, None))
    dense.refuse(hf_config, problems + dense.base_problems(hf_config))


# transformers always divides the selected scores by their sum, and does not write the key.
_NORMALIZES = {"norm_topk_prob": True}


def _check_mixture(hf_config: HfConfig) -> None:
    problems = dense.problems_of(hf_config, attention_bias=(False, None), norm_topk_prob=(True, None))
    problems += dense.base_problems(hf_config) + qwen3_moe.mixture_problems({**hf_config, **_NORMALIZES})
    dense.refuse(hf_config, problems)


def _layer_of_mixture(hf_config: HfConfig, number: int) -> Layer:
    return Layer(dense.attention(hf_config, qk_norm=True), qwen3_moe.mlp({**hf_config, **_NORMALIZES}, number))


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
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    name="qwen3_vl_moe",
    check=_check_mixture,
    layer=_layer_of_mixture,
    serving=Serving(
        vllm=vllm.plugin(
            PluginClasses(
                "Qwen3VLMoeForConditionalGeneration", trunk="qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration"
            ),
            quantizes=("mtp.layers.{head}.mlp.gate",),
        )
    ),
    tiny={**qwen3_moe.QWEN3_MOE.tiny, "moe_intermediate_size": 48},  # transformers does not transpose square stacks
)
