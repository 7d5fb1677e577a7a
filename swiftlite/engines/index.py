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


def names() -> list[str]:
    """Engines that generate: all."""
    return list(ENGINES)


def names_with_server() -> list[str]:
    """Engines whose server `deploy` can start."""
    return [name for name, info in ENGINES.items() if info.server]


def names_with_client() -> list[str]:
    """Engines whose server `bench` can measure."""
    return [name for name, info in ENGINES.items() if info.client]


def names_with_dry_load() -> list[str]:
    """Engines whose loaders `doctor` can ask."""
    return [name for name, info in ENGINES.items() if info.dry_load]
