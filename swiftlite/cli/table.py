"""Define all commands: words, options class, name of the function that runs the command, and a line of help."""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swiftlite.args.commands import (
    AdaptArgs,
    BenchArgs,
    DeployArgs,
    DoctorArgs,
    EvaluateArgs,
    ExportArgs,
    InferArgs,
    RegenerateArgs,
    ReportArgs,
    SftArgs,
    SpeedupArgs,
)
from swiftlite.args.docs import Choices
from swiftlite.args.rl_fields import CompletionArgs
from swiftlite.base.errors import UserError
from swiftlite.engines.index import names_with
from swiftlite.families.drafters import NEW
from swiftlite.families.serving.index import DRAFT_FOR
from swiftlite.methods.index import training_commands


@dataclass(frozen=True)
class Command:
    """A command of the command line."""

    words: str
    args_class: type
    target: str
    """"module:function"; the function accepts the arguments object, and returns None or an exit code."""
    line: str
    is_parallel: bool
    """Whether the command can run as several processes."""
    first_option: str = ""
    """Option that receives the words before the first flag. If empty, the first word is a file of options."""

    def choices(self) -> Choices:
        """Return the allowed values of options whose value is the name of an engine."""
        if issubclass(self.args_class, CompletionArgs):
            return {"draft_for": list(DRAFT_FOR), "infer_backend": names_with("draws_rollouts")}
        if issubclass(self.args_class, SftArgs):
            return {"draft_for": list(DRAFT_FOR), "drafter": list(NEW)}
        if self.args_class not in ENGINE_OPTIONS:
            return {}
        option, names = ENGINE_OPTIONS[self.args_class]
        return {option: names()}

    def load(self) -> Callable[[Any], int | None]:
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)


def commands() -> tuple[Command, ...]:
    """Return all commands: the training commands from the index of methods, then all other commands."""
    training = []
    for words, method in training_commands().items():
        training.append(Command(words, method.args_class, "swiftlite.train.run:run", method.line, True))
    return (*training, *OTHERS)


OTHERS = (
    Command(
        "speedup", SpeedupArgs, "swiftlite.improve.speedup.command:run", "train draft heads within a time budget", False
    ),
    Command(
        "adapt",
        AdaptArgs,
        "swiftlite.improve.adapt.command:run",
        "keep a server's draft heads up to date with its requests",
        False,
    ),
    Command("export", ExportArgs, "swiftlite.export.run:run", "convert a run to a Hugging Face model, or back", True),
    Command("infer", InferArgs, "swiftlite.serve.infer:run", "generate with MTP drafts and count accepted ones", False),
    Command(
        "regenerate",
        RegenerateArgs,
        "swiftlite.improve.regenerate.command:run",
        "regenerate the answers of a dataset",
        False,
    ),
    Command("deploy", DeployArgs, "swiftlite.serve.deploy:run", "start an engine's server with MTP drafts", False),
    Command(
        "evaluate", EvaluateArgs, "swiftlite.serve.evaluate.command:run", "measure the acceptance of MTP heads", False
    ),
    Command("bench", BenchArgs, "swiftlite.serve.bench.command:run", "measure a server's speed with MTP drafts", False),
    Command("report", ReportArgs, "swiftlite.report.command:run", "write an HTML page of training runs", False, "runs"),
    Command("doctor", DoctorArgs, "swiftlite.cli.doctor:run", "check the environment and validate a model", False),
)
# The option that names an engine, and its allowed values, by command.
ENGINE_OPTIONS: dict[type, tuple[str, Callable[[], list[str]]]] = {
    InferArgs: ("infer_backend", lambda: names_with("adapter")),
    RegenerateArgs: ("infer_backend", lambda: names_with("adapter")),
    DeployArgs: ("infer_backend", lambda: names_with("server")),
    EvaluateArgs: ("infer_backend", lambda: ["none", *names_with("adapter")]),
    ExportArgs: ("infer_backend", lambda: ["none", *names_with("adapter")]),
    BenchArgs: ("infer_backend", lambda: names_with("client")),
    SpeedupArgs: ("infer_backend", lambda: names_with("client")),
    DoctorArgs: ("engine", lambda: names_with("dry_load")),
}
# Training methods that are commands in other tools, and the command and option that select them in swiftlite.
_METHODS = {"megatron kto": "megatron dpo --loss_type kto", "megatron orpo": "megatron dpo --loss_type orpo"}


def find(argv: list[str]) -> tuple[Command, list[str]]:
    """Return the command at the start of argv, and the rest of argv.

    Raises:
        UserError: the command is unknown; the hint suggests a similar one.
    """
    for command in commands():
        words = command.words.split()
        if argv[: len(words)] == words:
            return command, argv[len(words) :]
    given = " ".join(word for word in argv[:2] if not word.startswith("-")) or argv[0]
    # The hint for `sft` and `megatron stf` is `megatron sft`; in `exprot model_dir`, the command is only one word.
    spellings = {command.words.split()[-1]: command.words for command in commands()}
    spellings |= {command.words: command.words for command in commands()}
    if given in _METHODS:
        raise UserError(f"unknown command: {given}", f"use swiftlite {_METHODS[given]}", exit_code=2)
    for attempt in (given, argv[0]):
        for near in difflib.get_close_matches(attempt, spellings, n=1):
            raise UserError(f"unknown command: {given}", f"did you mean swiftlite {spellings[near]}?", exit_code=2)
    names = ", ".join(command.words for command in commands())
    raise UserError(f"unknown command: {given}", f"commands: {names}", exit_code=2)
