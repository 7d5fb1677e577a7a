"""Conventions of vLLM 0.32.

Training uses the inputs that vLLM passes to heads by default, so they are defined once, in the family's file.
"""

from typing import Literal

from swiftlite.conventions.convention import Convention
from swiftlite.families import Family

# HF model_type -> the draft class, and which of several heads draft. The classes of Llama, Mistral, Seed-OSS and Qwen
# are those of swiftlite's plugin (models.py, image_models.py), which run each head at its step only on a GPU.
_DRAFTS: dict[str, tuple[str, Literal["each", "first"]]] = {
    "llama": ("LlamaMTPModel", "each"),
    "mistral": ("MistralMTPModel", "each"),
    "qwen2": ("Qwen2MTPModel", "each"),
    "qwen2_5_vl": ("Qwen2_5_VLMTPModel", "each"),
    "qwen3": ("Qwen3MTPModel", "each"),
    "mimo": ("MiMoMTP", "first"),  # it asserts that the draft step is 0
    "qwen3_moe": ("Qwen3MoeMTPModel", "each"),
    "qwen3_vl": ("Qwen3VLMTPModel", "each"),
    "seed_oss": ("SeedOssMTPModel", "each"),
    # These classes support several heads, but this was not measured; published models have one.
    "glm4_moe": ("Glm4MoeMTP", "first"),
    "glm4_moe_lite": ("Glm4MoeLiteMTP", "first"),
    "deepseek_v3": ("DeepSeekMTP", "first"),
    "hy_v3": ("HYV3MTP", "first"),
    # All heads share one projection and one set of norms.
    "qwen3_next": ("Qwen3NextMTP", "first"),
    "qwen3_5": ("Qwen3_5MTP", "first"),
    "qwen3_5_text": ("Qwen3_5MTP", "first"),
    "qwen3_5_moe": ("Qwen3_5MoeMTP", "first"),
    "qwen3_5_moe_text": ("Qwen3_5MoeMTP", "first"),
}


def convention(family: Family) -> Convention | None:
    """Return the convention with which vLLM runs the heads of a family; None if it was not measured."""
    if family.name not in _DRAFTS:
        return None
    draft, heads = _DRAFTS[family.name]
    return Convention(draft, heads, family.mtp.drafting)
