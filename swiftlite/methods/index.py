"""The index of training methods: one line each, by name."""

from collections.abc import Mapping
from typing import Any

from swiftlite.args.commands import SftArgs
from swiftlite.args.docs import options
from swiftlite.methods.dpo import DPO, KTO
from swiftlite.methods.method import Method
from swiftlite.methods.pt import PT
from swiftlite.methods.sft import SFT

METHODS: dict[str, Method] = {
    "sft": SFT,
    "pt": PT,
    "dpo": DPO,
    "kto": KTO,
}


def method_of(args: SftArgs) -> Method:
    """Return the method of a run with these options."""
    return method_for(type(args), args)


def method_for(args_class: type[SftArgs], args: Any) -> Method:
    """Return the method for a command's options.

    Args:
        args_class: options class of the command.
        args: object with the options that select among its methods, such as the options of `doctor --plan`.
    """
    return next(method for method in METHODS.values() if method.args_class is args_class and method.applies(args))


def training_commands() -> dict[str, Method]:
    """Return the commands that train, by their words, each with the first of its methods."""
    found: dict[str, Method] = {}
    for method in METHODS.values():
        found.setdefault(method.words, method)
    return found


def command_of_run(config: Mapping[str, Any]) -> Method:
    """Return the first method of the command that wrote a run's args.json.

    Args:
        config: the content of the file. Earlier releases wrote no `command`: an option that no other command has tells.
    """
    found = training_commands()
    words = config.get("command")
    if isinstance(words, str) and words in found:
        return found[words]
    shared = set(options(SftArgs))
    for method in found.values():
        if set(config) & (set(options(method.args_class)) - shared):
            return method
    return METHODS["sft"]
