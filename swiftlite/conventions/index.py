"""The engines that heads can be trained for, by the names that --draft_for takes."""

from collections.abc import Callable

from swiftlite.conventions import sglang, vllm
from swiftlite.conventions.convention import Convention, as_trained
from swiftlite.families import Family

CONVENTIONS: dict[str, Callable[[Family], Convention | None]] = {
    "transformers": as_trained,
    "vllm": vllm.convention,
    "sglang": sglang.convention,
}
