"""List the engines that heads can be trained for, under their --draft_for names."""

from collections.abc import Callable

from swiftlite.conventions import sglang, vllm
from swiftlite.conventions.convention import Convention, as_trained
from swiftlite.families import Family

CONVENTIONS: dict[str, Callable[[Family], Convention | None]] = {
    "transformers": as_trained,
    "vllm": vllm.convention,
    "sglang": sglang.convention,
}
