"""Run `swiftlite doctor --plan` with the options of a training command."""

import dataclasses
from typing import Any

from swiftlite.args.commands import PlanArgs, PlannedRun, SftArgs
from swiftlite.args.config import COMMAND_KEY, read_file
from swiftlite.cli.layout_plan import report_layouts
from swiftlite.cli.memory_plan import report_memory
from swiftlite.cli.parse import name_of, split
from swiftlite.cli.size_plan import report_sizes
from swiftlite.cli.table import Command
from swiftlite.methods.index import training_commands
from swiftlite.plan.facts import read_facts
from swiftlite.plan.heads import with_source_of_heads
from swiftlite.plan.layout import group_of


def planned_command(command: Command, argv: list[str]) -> Command:
    """Return the training command whose run `doctor --plan` plans, also with the options `PlanArgs`.

    Without --plan, return `command`.
    """
    given: dict[str, Any] = {}
    if argv and not argv[0].startswith("-"):
        given |= {str(key).replace("-", "_"): value for key, (value, _) in read_file(argv[0]).items()}
    given |= {name_of(flag): texts for flag, texts in split(argv)[0]}
    plan = given.get("plan", False)  # of a file a bool, of the command line its words
    if plan is False or (isinstance(plan, list) and [word.lower() for word in plan] == ["false"]):
        return command
    trains, words = training_commands(), str(given.get(COMMAND_KEY))
    if words not in trains:
        words = _words_for(set(given))
    bases = (PlanArgs, trains[words].args_class)
    args_class = dataclasses.make_dataclass("PlannedArgs", [], bases=bases, frozen=True)
    return dataclasses.replace(command, words=words, args_class=args_class)


def _words_for(given: set[str]) -> str:
    """Return the words of the first training command that has all given options, or most of them."""
    unknown = {}
    for words, method in training_commands().items():
        # Also options that the command does not support: their message gives the reason.
        unknown[words] = len(given - {field.name for field in dataclasses.fields(method.args_class)})
    has_completions = "max_completion_length" in given
    if "teacher_model" in given and not has_completions:  # `megatron grpo` also has teachers
        unknown = {"megatron gkd": unknown["megatron gkd"]} | unknown
    return min(unknown, key=lambda words: unknown[words])


def separate(args: Any) -> Any:
    """Return the options of doctor and of the planned run as a `PlannedRun`; other options unchanged."""
    if not (isinstance(args, PlanArgs) and isinstance(args, SftArgs)):
        return args
    _, of_run = type(args).__bases__
    return PlannedRun(group_of(args, PlanArgs), group_of(args, of_run))


def run(args: PlannedRun) -> int:
    """Print the plan, and return the exit code: 1 if the run does not fit."""
    if not args.run.model:
        report_sizes(args.run)
        return 0
    facts = read_facts(args)
    run = with_source_of_heads(args.run, facts.heads)
    if args.own.gpu_type:
        return int(not report_layouts(args.own, run, facts))
    return int(not report_memory(args.own, run, facts))
