"""Conventions of SGLang 0.5.23, which differ from vLLM's for some families."""

from typing import TYPE_CHECKING, Any

from swiftlite.families.serving.convention import Convention, Matching, PluginClasses

if TYPE_CHECKING:
    from swiftlite.families.family import Family

MATCHING = Matching("SGLang", reads_files=False, compares_parts=True)
DECODER = "model.decoder."
FIRST_LAYER = "model.layers.0."
"""Block of classes that give their layer the names of the trunk's first layer."""


def plugin(classes: PluginClasses, **facts: Any) -> Convention:
    """Return the convention of a draft class of swiftlite's plugin."""
    return Convention(f"{classes.architecture}MTP", "one", classes=classes, **facts)


def convention(family: "Family") -> Convention | None:
    """Return the convention with which SGLang runs the heads of a family; None if it was not measured."""
    return family.serving.sglang
