"""Make the classes of a plugin that consist only of names of an engine's classes.

The file of a family contains these names (`PluginClasses`). The plugin's modules of model classes call `class_of` from
their `__getattr__`, because engines find classes by module and name. All other classes are defined in these modules.
"""

from collections.abc import Mapping
from importlib import import_module
from types import new_class
from typing import Any

from swiftlite.engines.loading.head_weights import FUSED_MODULES
from swiftlite.families.serving.convention import Convention, PluginClasses


def class_of(name: str, drafts: Mapping[str, Convention], models: str, scope: dict[str, Any]) -> type:
    """Return the trunk's or draft's class with this name, and store it, so that there is one class with this name.

    Args:
        drafts: conventions of the engine, by architecture of the trunk (`drafts_of_plugin`).
        models: name of the engine's package of model classes.
        scope: names of the plugin's module, which defines the base classes, and gets the result.

    Raises:
        AttributeError: no family has a class with this name.
    """
    for architecture, known in drafts.items():
        classes = known.classes
        assert classes is not None
        if name == architecture and classes.trunk:
            bases = (scope[classes.trunk_base], _engine_class(classes.trunk, models, scope))
            return _store(name, bases, {"__doc__": "The trunk of a checkpoint with MTP heads."}, scope)
        if name == known.draft and (classes.layer or classes.draft_base):
            base = scope[classes.draft_base or "MtpDraft"]
            return _store(name, (base,), _members(classes, models, scope), scope)
    raise AttributeError(f"module {scope['__name__']!r} has no attribute {name!r}")


def _members(classes: PluginClasses, models: str, scope: Mapping[str, Any]) -> dict[str, Any]:
    members: dict[str, Any] = {"__doc__": f"MTP draft model for {classes.architecture}."}
    if classes.layer:
        members["layer_class"] = _engine_class(classes.layer, models, scope)
    if classes.is_fused:
        members["packed_modules_mapping"] = FUSED_MODULES
    if classes.expert_matrices:
        members["expert_matrices"] = classes.expert_matrices
    return members


def _engine_class(name: str, models: str, scope: Mapping[str, Any]) -> Any:
    """Return a class of the engine ("module:Class"), or one of the plugin's module ("Class")."""
    module, _, own = name.rpartition(":")
    if not module:
        return scope[own]
    return getattr(import_module(f"{models}.{module}"), own)


def _store(name: str, bases: tuple[Any, ...], members: Mapping[str, Any], scope: dict[str, Any]) -> type:
    made = new_class(name, bases, exec_body=lambda body: body.update(members, __module__=scope["__name__"]))
    scope[name] = made
    return made
