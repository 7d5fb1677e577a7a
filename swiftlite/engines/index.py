"""A list of all engines, by their name in --infer_backend."""

from swiftlite.engines.info import EngineInfo
from swiftlite.engines.llamacpp.info import LLAMACPP
from swiftlite.engines.sglang.info import SGLANG
from swiftlite.engines.transformers.info import TRANSFORMERS
from swiftlite.engines.vllm.info import VLLM

ENGINES: dict[str, EngineInfo] = {
    "transformers": TRANSFORMERS,
    "vllm": VLLM,
    "sglang": SGLANG,
    "llamacpp": LLAMACPP,
}


def names_with(part: str) -> list[str]:
    """Return the names of engines whose `EngineInfo` has a value for the attribute `part`.

    `deploy` requires `server`, `bench` requires `client`, `doctor` requires `dry_load`, and `evaluate --server`
    requires `counts_drafts`. All engines have `adapter`.
    """
    return [name for name, info in ENGINES.items() if vars(info)[part]]
