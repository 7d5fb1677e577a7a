"""A list of all training methods, by name."""

from collections.abc import Mapping
from typing import Any

from swiftlite.args.commands import SftArgs
from swiftlite.args.docs import options
from swiftlite.methods.dpo import DPO, KTO
from swiftlite.methods.gkd import GKD
from swiftlite.methods.grpo import GRPO
from swiftlite.methods.method import Method
from swiftlite.methods.pt import PT
from swiftlite.methods.rm import RM
from swiftlite.methods.sft import SFT

METHODS: dict[str, Method] = {
    "sft": SFT,
    "pt": PT,
    "dpo": DPO,
    "kto": KTO,
    "rm": RM,
    "grpo": GRPO,
    "gkd": GKD,
}


def method_of(args: SftArgs) -> Method:
    """Return the method of a run with these options. Exactly one method of each command applies."""
    return next(method for method in METHODS.values() if method.args_class is type(args) and method.applies(args))


def training_commands() -> dict[str, Method]:
    """Return the training commands, by their words, each with its first method in `METHODS`.

    Methods of one command have the same help and the same options class, so those of the first method are used.
    `megatron dpo` uses those of DPO, also for KTO.
    """
    found: dict[str, Method] = {}
    for method in METHODS.values():
        found.setdefault(method.words, method)
    return found


def command_of_run(config: Mapping[str, Any]) -> Method:
    """Return the first method of the command that wrote a run's args.json.

    Args:
        config: the content of the file. Files of earlier releases have no `command`. For them, an option that only one
            command has identifies the command, such as `ref_model` for `megatron dpo`.
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
