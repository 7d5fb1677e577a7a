"""The commands: words, argument class, the function that runs it (by name: nothing loads early), one line of help."""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swiftlite.args.commands import (
    BenchArgs,
    DeployArgs,
    DoctorArgs,
    EvaluateArgs,
    ExportArgs,
    InferArgs,
    RegenerateArgs,
    ReportArgs,
    SftArgs,
)
from swiftlite.args.docs import Choices
from swiftlite.conventions.index import CONVENTIONS
from swiftlite.engines.index import names_with
from swiftlite.errors import UserError
from swiftlite.methods.index import training_commands


@dataclass(frozen=True)
class Command:
    """One line of the table."""

    words: str
    args_class: type
    target: str
    """module:function; the function takes the arguments and returns None or an exit code."""
    line: str
    is_parallel: bool
    """Whether it can run as several processes."""
    first_option: str = ""
    """An option that words before any flag belong to; without one, the first word is a file of options."""

    def choices(self) -> Choices:
        """Return the values of its option that takes an engine's name, from the index of engines; {} without one."""
        if issubclass(self.args_class, SftArgs):
            return {"draft_for": list(CONVENTIONS)}
        if self.args_class not in ENGINE_OPTIONS:
            return {}
        option, names = ENGINE_OPTIONS[self.args_class]
        return {option: names()}

    def load(self) -> Callable[[Any], int | None]:
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)


def commands() -> tuple[Command, ...]:
    """Return all commands: training commands from the index of methods, and the others."""
    training = []
    for words, method in training_commands().items():
        training.append(Command(words, method.args_class, "swiftlite.train.run:run", method.line, True))
    return (*training, *OTHERS)


OTHERS = (
    Command("export", ExportArgs, "swiftlite.export.run:run", "a run to a Hugging Face model, or the other way", True),
    Command("infer", InferArgs, "swiftlite.serve.infer:run", "generate, heads drafting, count what is accepted", False),
    Command(
        "regenerate", RegenerateArgs, "swiftlite.regenerate.command:run", "a dataset answered anew, for heads", False
    ),
    Command("deploy", DeployArgs, "swiftlite.serve.deploy:run", "an engine's own server, heads drafting", False),
    Command(
        "evaluate", EvaluateArgs, "swiftlite.evaluate.command:run", "how often the heads are right, by channel", False
    ),
    Command("bench", BenchArgs, "swiftlite.bench.command:run", "how many tokens to draft, by measured speed", False),
    Command("report", ReportArgs, "swiftlite.report.command:run", "runs to look at, in a browser", False, "runs"),
    Command("doctor", DoctorArgs, "swiftlite.cli.doctor:run", "what works here, and is this model whole", False),
)
# The option that takes an engine's name, and the names that it takes.
ENGINE_OPTIONS: dict[type, tuple[str, Callable[[], list[str]]]] = {
    InferArgs: ("infer_backend", lambda: names_with("adapter")),
    RegenerateArgs: ("infer_backend", lambda: names_with("adapter")),
    DeployArgs: ("infer_backend", lambda: names_with("server")),
    EvaluateArgs: ("infer_backend", lambda: ["none", *names_with("adapter")]),
    BenchArgs: ("infer_backend", lambda: names_with("client")),
    DoctorArgs: ("engine", lambda: names_with("dry_load")),
}


def find(argv: list[str]) -> tuple[Command, list[str]]:
    """Return the command at the start of argv, and the rest of argv.

    Raises:
        UserError: there is no such command; suggests a similar one.
    """
    for command in commands():
        words = command.words.split()
        if argv[: len(words)] == words:
            return command, argv[len(words) :]
    given = " ".join(word for word in argv[:2] if not word.startswith("-"))
    # `sft` alone and `megatron stf` both mean `megatron sft`; `export model_dir` and `exprot model_dir` have one word.
    spellings = {command.words.split()[-1]: command.words for command in commands()}
    spellings |= {command.words: command.words for command in commands()}
    for attempt in (given, argv[0]):
        for near in difflib.get_close_matches(attempt, spellings, n=1):
            raise UserError(f"`{given}` is no command", f"did you mean swiftlite {spellings[near]}?", exit_code=2)
    names = ", ".join(command.words for command in commands())
    raise UserError(f"`{given}` is no command", f"commands: {names}", exit_code=2)
