"""List the engines that heads can be trained for, under their --draft_for names."""

from collections.abc import Callable

from swiftlite.families import Family
from swiftlite.families.serving import llamacpp, sglang, vllm
from swiftlite.families.serving.convention import Convention, Matching, as_trained

CONVENTIONS: dict[str, Callable[[Family], Convention | None]] = {
    "transformers": as_trained,
    "vllm": vllm.convention,
    "sglang": sglang.convention,
    "llamacpp": llamacpp.convention,
}
MATCHINGS: dict[str, Matching] = {"vllm": vllm.MATCHING, "sglang": sglang.MATCHING}
"""Engines that build drafts from quantization_config. The engine transformers reads the tensors of heads as numbers."""
