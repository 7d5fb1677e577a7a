"""Conventions of vLLM 0.32.

Training uses the inputs that vLLM passes to heads by default, so they are defined once, in `Family.mtp`.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swiftlite.families.serving.convention import Convention, Matching, PluginClasses

if TYPE_CHECKING:
    from swiftlite.families.family import Family

MATCHING = Matching("vLLM", reads_files=True, compares_parts=False)
NEXT_LAYER = "model.layers.{layer}."
FUSION = ("mtp.fc",)
TRANSFORMERS = "transformers:TransformersForCausalLM"
"""Class of trunks for which vLLM has no class of its own; it runs the modules of transformers."""


def plugin(classes: PluginClasses, **facts: Any) -> Convention:
    """Return the convention of a draft class of swiftlite's plugin, which runs each head at its step only on a GPU."""
    stem = classes.architecture.partition("For")[0]
    return Convention(f"{stem}MTPModel", classes=classes, **facts)


def next_layer(draft: str, **facts: Any) -> Convention:
    """Return the convention of a class of vLLM that numbers heads after the trunk's layers.

    These classes support several heads, but this was not measured; published models have one.
    """
    return Convention(draft, "first", block=NEXT_LAYER, **facts)


def convention(family: "Family") -> Convention | None:
    """Return the convention with which vLLM runs the heads of a family; None if it was not measured."""
    known = family.serving.vllm
    if known is None:
        return None
    return replace(known, drafting=family.mtp.drafting)
