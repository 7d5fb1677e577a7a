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
    """Return the engines whose record has a part: a `server` for `deploy`, a `client` for `bench`, a `dry_load` for
    `doctor`. All have an `adapter`."""
    return [name for name, info in ENGINES.items() if vars(info)[part]]
