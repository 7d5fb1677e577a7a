"""How SGLang 0.5.23 drafts. What it feeds the heads stands in the family's file, as heads can be trained for it."""

from typing import Literal

from swiftlite.engines.convention import Convention
from swiftlite.families import Family

# HF model_type -> the class that drafts, and which of several heads do. The classes of Llama, Mistral, Qwen2, Qwen3 and
# Seed-OSS are our plugin's (models/dense.py).
_DRAFTS: dict[str, tuple[str, Literal["first", "last", "one"]]] = {
    "llama": ("LlamaForCausalLMMTP", "one"),
    "mistral": ("MistralForCausalLMMTP", "one"),
    "qwen2": ("Qwen2ForCausalLMMTP", "one"),
    "qwen3": ("Qwen3ForCausalLMMTP", "one"),
    "mimo": ("MiMoMTP", "last"),
    "seed_oss": ("SeedOssForCausalLMMTP", "one"),
    "qwen3_moe": ("Qwen3MoeForCausalLMMTP", "first"),
    "glm4_moe": ("Glm4MoeForCausalLMNextN", "one"),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLMNextN", "one"),
    "deepseek_v3": ("DeepseekV3ForCausalLMNextN", "one"),
    "hy_v3": ("HYV3ForCausalLMNextN", "first"),
    "qwen3_next": ("Qwen3NextForCausalLMMTP", "one"),
    "qwen3_5": ("Qwen3_5ForCausalLMMTP", "one"),
    "qwen3_5_text": ("Qwen3_5ForCausalLMMTP", "one"),
    "qwen3_5_moe": ("Qwen3_5ForCausalLMMTP", "one"),
    "qwen3_5_moe_text": ("Qwen3_5ForCausalLMMTP", "one"),
}


def convention(family: Family) -> Convention | None:
    """The line of a family; None when there is none."""
    if family.name not in _DRAFTS:
        return None
    draft, heads = _DRAFTS[family.name]
    return Convention(draft, heads, family.mtp.drafting_for("sglang"))
