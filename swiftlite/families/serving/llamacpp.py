"""Conventions of llama.cpp b11549.

Its graphs for MTP heads read the trunk's state after its norm and their own state after the output norm, in all
architectures. This differs from vLLM's inputs for some families (`sft --draft_for llamacpp`).
"""

from swiftlite.families import FAMILIES, Family
from swiftlite.families.serving.convention import Convention

ARCHITECTURES = {name: family.serving.llamacpp for name, family in FAMILIES.items() if family.serving.llamacpp}
"""HF model_type -> the architecture of llama.cpp that runs the trunk and the heads of the family
(`gguf/architectures.py`)."""


def convention(family: Family) -> Convention | None:
    """Return the convention with which llama.cpp runs the heads of a family; None if it cannot run them."""
    if not family.serving.llamacpp:
        return None
    return Convention(family.serving.llamacpp, "one")
