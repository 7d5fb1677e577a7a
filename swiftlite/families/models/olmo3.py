"""OLMo 3: OLMo 2 with a sliding window in three of four layers. Only layers without a window have YaRN.

MTP heads have no window.
"""

from dataclasses import replace

from swiftlite.families import dense, windows
from swiftlite.families.architecture import Outside
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.models.olmo2 import OLMO2
from swiftlite.families.rope import has_default_scale
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving

_INTERVAL = 4
# In transformers, the base of old files belongs to layers without a window.
_BASES: windows.Bases = {windows.WINDOW: (None, 500_000.0), windows.FULL: ("rope_theta", None)}


def _check(hf_config: HfConfig) -> None:
    problems = windows.problems_of(hf_config, _BASES, _INTERVAL, attention_bias=(False, None))
    if not problems:
        problems += _rope_problems(hf_config)
    dense.refuse(hf_config, problems)


def _rope_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem for every rotary setting that programs understand differently.

    In SGLang, all layers have the same base, and layers with a window have no other settings.
    """
    window, full = (windows.rope(hf_config, kind, _BASES)["rope_parameters"] for kind in windows.KINDS)
    problems = []
    if full["rope_theta"] is None:
        problems.append("rope_parameters: rope_theta is missing, and its default differs between readers")
    elif not isinstance(full["rope_theta"], int | float):
        problems.append(f"rope_parameters: rope_theta {full['rope_theta']!r} is not a number")
    elif full["rope_theta"] != window["rope_theta"]:
        problems.append(
            f"rope_parameters: rope_theta {full['rope_theta']} is only that of layers without a window; others have "
            f"{window['rope_theta']}, which is not supported"
        )
    if window["rope_type"] != "default":
        problems.append(f"rope_parameters: rope_type {window['rope_type']!r} of {windows.WINDOW} is not supported")
    if full["rope_type"] == "yarn" and not has_default_scale(full):
        problems.append(
            f"rope_parameters: attention_factor {full['attention_factor']!r} is ignored by SGLang, which uses "
            "0.1 * log(factor) + 1"
        )
    if "type" in full:
        problems.append("rope_scaling: type is not supported; use rope_type")
    return problems


def _layer(hf_config: HfConfig, number: int) -> Layer:
    attention = windows.attention(hf_config, number, _INTERVAL)
    return replace(OLMO2.layer(hf_config, number), attention=replace(attention, qk_norm_is_joint=True))


def _outside(hf_config: HfConfig) -> Outside:
    ropes = tuple(windows.rope(hf_config, kind, _BASES) for kind in windows.KINDS)
    return replace(OLMO2.outside(hf_config), ropes=ropes)


OLMO3 = dense.family(
    name="olmo3",
    check=_check,
    layer=_layer,
    outside=_outside,
    serving=Serving(
        vllm=vllm.plugin(PluginClasses("Olmo3ForCausalLM", trunk=vllm.TRANSFORMERS, draft_base="Olmo2MTPModel")),
        sglang=sglang.plugin(PluginClasses("Olmo2ForCausalLM", layer="Olmo2Layer")),
    ),
    tiny={
        "sliding_window": 8,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 500000.0,
            }
        },
    },
)
