"""Conventions of llama.cpp b11549.

Its graphs for MTP heads read the trunk's state after its norm and their own state after the output norm, in all
architectures. This differs from vLLM's inputs for some families (`sft --draft_for llamacpp`).
"""

from swiftlite.families import Family
from swiftlite.families.serving.convention import Convention

ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "seed_oss", "mimo", "glm4_moe"), "glm4moe"),
    **dict.fromkeys(("qwen3_moe", "hy_v3"), "hy_v3"),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), "deepseek2"),
    "qwen3_next": "qwen3next",
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), "qwen35"),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), "qwen35moe"),
}
"""HF model_type -> the architecture of llama.cpp that runs the trunk and the heads of the family
(`gguf/architectures.py`)."""


def convention(family: Family) -> Convention | None:
    """Return the convention with which llama.cpp runs the heads of a family; None if it cannot run them."""
    name = ARCHITECTURES.get(family.name)
    if name is None:
        return None
    return Convention(name, "one")
