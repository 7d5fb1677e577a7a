"""List the engines, and what heads can be trained for, under its --draft_for name."""

from collections.abc import Callable

from swiftlite.families import FAMILIES, Family
from swiftlite.families.serving import llamacpp, sglang, stock, vllm
from swiftlite.families.serving.convention import Convention, Matching, as_trained

CONVENTIONS: dict[str, Callable[[Family], Convention | None]] = {
    "transformers": as_trained,
    "vllm": vllm.convention,
    "sglang": sglang.convention,
    "llamacpp": llamacpp.convention,
}
DRAFT_FOR = {**CONVENTIONS, stock.STOCK: stock.convention}
"""What heads can be trained for: an engine, or vLLM without swiftlite's plugin."""
MATCHINGS: dict[str, Matching] = {"vllm": vllm.MATCHING, "sglang": sglang.MATCHING}
"""Engines that build drafts from quantization_config. The engine transformers reads the tensors of heads as numbers."""


def drafts_of_plugin(convention: Callable[[Family], Convention | None]) -> dict[str, Convention]:
    """Return the conventions of an engine whose draft class is one of swiftlite's plugin, by architecture of the trunk.

    Args:
        convention: an engine's entry in CONVENTIONS.
    """
    found = filter(None, map(convention, FAMILIES.values()))
    return {known.classes.architecture: known for known in found if known.classes is not None}


def model_types(convention: Callable[[Family], Convention | None]) -> dict[str, str]:
    """Return the `model_type` for which an engine has the draft class, by the family's, where they differ."""
    known = {name: convention(family) for name, family in FAMILIES.items()}
    return {name: each.model_type for name, each in known.items() if each and each.model_type}
