"""How a running vLLM is told of new weights: its weight-transfer API, with the backend of `weight_transfer.py`."""

from pathlib import Path
from typing import TYPE_CHECKING

from swiftlite.engines.weight_update import Part

if TYPE_CHECKING:
    from vllm import LLM

WEIGHT_TRANSFER = "swiftlite"
"""That backend, among those of vLLM."""


class VllmChannel:
    """See `Channel`.

    Args:
        llm: started with that backend.
    """

    def __init__(self, llm: "LLM"):
        self._llm = llm

    def start(self, part: Part) -> None:
        if part == "target":
            self._llm.start_weight_update()
        else:
            self._llm.start_draft_weight_update()

    def send(self, path: Path) -> None:
        self._llm.update_weights({"update_info": {"path": str(path)}})

    def finish(self) -> None:
        self._llm.finish_weight_update()

    def forget_cached(self) -> bool:
        return self._llm.reset_prefix_cache()
