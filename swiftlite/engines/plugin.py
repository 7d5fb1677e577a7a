"""Makes sure that an engine's processes will find swiftlite's plugin for it."""

import importlib.metadata
import os

from swiftlite.engines.info import EngineInfo
from swiftlite.errors import UserError


def require_plugin(info: EngineInfo) -> None:
    """An engine's processes find the plugin through the installed package, not through this process.

    Raises:
        UserError: swiftlite is not installed as a package, or the engine was told to leave the plugin out.
    """
    plugin = info.plugin
    assert plugin is not None
    installed = {point.value: point.name for point in importlib.metadata.entry_points(group=plugin.group)}
    name = installed.get(plugin.entry_point)
    if name is None:
        raise UserError(
            f"{info.label} would not find swiftlite's plugin: swiftlite is not installed as a package",
            "run pip install -e . in its directory",
        )
    allowed = os.environ.get(plugin.variable)
    if allowed is not None and name not in allowed.split(","):
        raise UserError(
            f"{plugin.variable}={allowed} keeps {info.label} from loading swiftlite's plugin",
            f"add {name} to it, or unset it",
        )
