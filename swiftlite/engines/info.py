"""`EngineInfo`: everything that swiftlite knows of an engine before the engine is loaded.

Commands, rules and messages iterate over these records (`index.py`) and know no engine by name. Whatever needs torch or
the engine itself stands here as "module:attribute" and is loaded when it is used.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from swiftlite.args.config import Problem
from swiftlite.args.docs import options
from swiftlite.errors import UserError

if TYPE_CHECKING:
    from swiftlite.engines.convention import Convention
    from swiftlite.families import Family


@dataclass(frozen=True)
class Plugin:
    """swiftlite's plugin for an engine, which the engine loads in each of its processes.

    Attributes:
        entry_point: "module:function", as pyproject.toml has it.
        group: of entry points, in which the engine looks for plugins.
        variable: environment variable that says which plugins the engine may load.
    """

    entry_point: str
    group: str
    variable: str


@dataclass(frozen=True)
class EngineInfo:
    """One engine.

    Attributes:
        name: what --infer_backend takes.
        label: the engine's name as its makers write it.
        package: what Python imports; an engine whose package is not found is not installed.
        distributions: names by which pip may have installed it.
        install: what to type when it is not installed.
        adapter: class of the `Engine`, called with an `EngineConfig`.
        convention: function from a `Family` to the `Convention` by which the engine drafts with its heads; None of a
            family for which nobody has measured it.
        is_required: whether swiftlite itself cannot do without its package.
        is_batched: whether the engine answers several prompts at once.
        options: class of the engine's own options in args/fields.py, part of the classes of the commands; None when it
            has none. Every name begins with the engine's.
        drafting_options: the options of drafting that such a class has, by the engine's own names; None when none were
            given.
        rules: what cannot be of its options, as functions that yield (problem, hint).
        server: function from `DeployArgs`, a `ServedModel` and whether to draft to a `ServerCommand`. "": the engine
            has no server, and `deploy` does not offer it.
        client: class of the `Client` that `bench` asks the server through. "": `bench` does not offer the engine.
        dry_load: function from an `EngineConfig` to a `LoadReport`, called in a process of its own. "": `doctor` does
            not offer the engine.
        known_report: function from a `ServedModel` to a `LoadReport` of what is known where the engine is not
            installed. "": nothing is.
        prints_anywhere: whether the server's command can be made where the engine is not installed.
        plugin: what the engine lacks to serve our checkpoints; None when it lacks nothing.
    """

    name: str
    label: str
    package: str
    distributions: tuple[str, ...]
    install: str
    adapter: str
    convention: str
    is_required: bool = False
    is_batched: bool = True
    options: type | None = None
    drafting_options: Callable[[Any], dict[str, Any] | None] = lambda args: None
    rules: tuple[Callable[[Any], Iterator[Problem]], ...] = ()
    server: str = ""
    client: str = ""
    dry_load: str = ""
    known_report: str = ""
    prints_anywhere: bool = False
    plugin: Plugin | None = None

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    @property
    def kwargs_option(self) -> str:
        """The option that holds the engine's keyword arguments."""
        return f"{self.name}_engine_kwargs"

    @property
    def option_names(self) -> tuple[str, ...]:
        """The engine's own options."""
        return tuple(options(self.options)) if self.options else ()

    @property
    def speculative_option_names(self) -> tuple[str, ...]:
        """The engine's own options that say how to draft."""
        return tuple(name for name in self.option_names if name != self.kwargs_option)

    def has_options_in(self, args: Any) -> bool:
        """Whether the options of a command have the engine's own."""
        return self.options is not None and isinstance(args, self.options)

    def engine_kwargs(self, args: Any) -> dict[str, Any]:
        """The engine's keyword arguments that the user gave."""
        return vars(args)[self.kwargs_option] or {} if self.has_options_in(args) else {}

    def speculative_config(self, args: Any) -> dict[str, Any] | None:
        """The engine's own options of drafting that the user gave."""
        return self.drafting_options(args) if self.has_options_in(args) else None

    def problems(self, args: Any) -> Iterator[Problem]:
        """What the engine's own rules object to."""
        if self.has_options_in(args):
            for rule in self.rules:
                yield from rule(args)

    def convention_for(self, family: "Family") -> "Convention":
        """How the engine drafts with the heads of a family.

        Raises:
            UserError: nobody has measured it.
        """
        found = resolve_name(self.convention)(family)
        if found is None:
            raise UserError(
                f"how {self.label} drafts with the heads of a {family.name} has not been measured",
                f"measure it and add its line to {self.convention.partition(':')[0]}, or use another engine",
            )
        return found
