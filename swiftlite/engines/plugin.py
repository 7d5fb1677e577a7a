"""Check that an engine's processes will find swiftlite's plugin."""

import importlib.metadata
import os

from swiftlite.base.errors import UserError
from swiftlite.engines.info import EngineInfo


def require_plugin(info: EngineInfo) -> None:
    """Check that the plugin is installed and enabled; an engine's processes find the plugin by its entry point.

    Raises:
        UserError: swiftlite is not installed as a package, or a variable of the engine excludes the plugin.
    """
    if problem := plugin_problem(info):
        raise problem


def plugin_problem(info: EngineInfo) -> UserError | None:
    """Return why an engine's processes will not load the plugin; None if they will."""
    plugin = info.plugin
    assert plugin is not None
    installed = {point.value: point.name for point in importlib.metadata.entry_points(group=plugin.group)}
    name = installed.get(plugin.entry_point)
    if name is None:
        return UserError(
            f"{info.label} requires swiftlite's plugin, but swiftlite is not installed as a package",
            "run pip install -e . in the directory of swiftlite",
        )
    allowed = os.environ.get(plugin.variable)
    if allowed is not None and name not in allowed.split(","):
        return UserError(
            f"{info.label} requires swiftlite's plugin, which {plugin.variable}={allowed} excludes",
            f"add {name} to {plugin.variable}, or unset it",
        )
    return None
