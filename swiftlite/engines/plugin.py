"""Makes sure that an engine's processes will find swiftlite's plugin for it."""

import importlib.metadata
import os
from typing import Literal

from swiftlite.errors import UserError

_GROUPS = {"vllm": ("vllm.general_plugins", "VLLM_PLUGINS"), "sglang": ("sglang.srt.plugins", "SGLANG_PLUGINS")}


def require_plugin(engine: Literal["vllm", "sglang"]) -> None:
    """An engine's processes find the plugin through the installed package, not through this process.

    Raises:
        UserError: swiftlite is not installed as a package, or the engine was told to leave the plugin out.
    """
    group, variable = _GROUPS[engine]
    name = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
    plugin = f"swiftlite.engines.{engine}.plugin:register"
    installed = {point.value: point.name for point in importlib.metadata.entry_points(group=group)}
    if plugin not in installed:
        raise UserError(
            f"{name} would not find swiftlite's plugin: swiftlite is not installed as a package",
            "run pip install -e . in its directory",
        )
    allowed = os.environ.get(variable)
    if allowed is not None and installed[plugin] not in allowed.split(","):
        raise UserError(
            f"{variable}={allowed} keeps {name} from loading swiftlite's plugin",
            f"add {installed[plugin]} to it, or unset it",
        )
