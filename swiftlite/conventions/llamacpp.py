"""Conventions of llama.cpp b11549.

Its graphs for MTP heads read the trunk's state after its norm and their own state after the output norm, in all
architectures. This differs from vLLM's inputs for some families (`sft --draft_for llamacpp`).
"""

from swiftlite.conventions.convention import Convention
from swiftlite.families import Family
from swiftlite.gguf.architectures import ARCHITECTURES


def convention(family: Family) -> Convention | None:
    """Return the convention with which llama.cpp runs the heads of a family; None if it cannot run them."""
    architecture = ARCHITECTURES.get(family.name)
    if architecture is None:
        return None
    return Convention(architecture.name, "one")
