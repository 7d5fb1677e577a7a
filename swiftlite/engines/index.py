"""The index of engines: one line each, by the name that --infer_backend takes."""

from swiftlite.engines.info import EngineInfo
from swiftlite.engines.sglang.info import SGLANG
from swiftlite.engines.transformers.info import TRANSFORMERS
from swiftlite.engines.vllm.info import VLLM

ENGINES: dict[str, EngineInfo] = {
    "transformers": TRANSFORMERS,
    "vllm": VLLM,
    "sglang": SGLANG,
}


def names_with(part: str) -> list[str]:
    """Engines whose record has this part: a `server` that `deploy` can start, a `client` by which `bench` asks it, a
    `dry_load` for `doctor`. All have an `adapter`."""
    return [name for name, info in ENGINES.items() if vars(info)[part]]
