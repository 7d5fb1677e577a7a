"""Rules for options, checked before torch is imported.

This package may import `args` and `plan`, and read small files. A rule is a small function, named after its
requirement, that yields (problem, hint) in the user's terms. `check` runs all rules of a command and reports all
problems together. A setting without effect is a note, not a problem. Each command has one file. `common.py` has the
rules that commands share. The rules of the largest command, `megatron sft`, are in several files by subject
(`training/sft_*.py`).
"""

from typing import Any

from swiftlite.args.commands import (
    AdaptArgs,
    BenchArgs,
    DeployArgs,
    DoctorArgs,
    EvaluateArgs,
    ExportArgs,
    InferArgs,
    PlannedRun,
    RegenerateArgs,
    ReportArgs,
    SftArgs,
    SpeedupArgs,
)
from swiftlite.args.config import Problem
from swiftlite.base.errors import OptionError
from swiftlite.base.heads import DRAFTER_KEY
from swiftlite.families.index import impossible_values
from swiftlite.methods.index import method_of
from swiftlite.plan.facts import Facts, config_directory, read_facts
from swiftlite.plan.kernels import Machine, this_machine
from swiftlite.rules import (
    adapt,
    bench,
    common,
    deploy,
    doctor,
    evaluate,
    export,
    infer,
    planned,
    regenerate,
    report,
    speedup,
)
from swiftlite.runtime.environment import sees_gpu


def check(args: Any, world_size: int = 1) -> list[str]:
    """Run every rule of the command that these arguments belong to.

    Args:
        args: an instance of one of the command classes.
        world_size: number of processes of the run.

    Returns:
        Notes: settings that have no effect, and why.

    Raises:
        OptionError: an option is invalid; the error lists every problem. Problems of texts, and options that the
            command does not have, are reported before all others.
    """
    problems: list[Problem] = []
    for part in (args.own, args.run) if isinstance(args, PlannedRun) else (args,):
        problems += common.texts_can_be(part)
        problems += common.template_variables_can_be_set(part)
        problems += common.options_are_of_the_command(part)
    if problems:  # other rules require valid texts, and would explain options that the command does not have
        raise OptionError(problems)
    machine = Machine()
    if isinstance(args, SftArgs):
        machine = this_machine(sees_gpu())
    facts = read_facts(args, world_size, machine)
    if found := impossible_values(facts.hf_config):  # other rules compute with these values
        raise OptionError([_impossible(problem, args, facts) for problem in found])
    module = rules_of(args)
    for rule in module.RULES:
        problems += rule(args, facts)
    if problems:
        raise OptionError(problems)
    notes: list[str] = []
    for rule in module.NOTES:
        notes += rule(args, facts)
    return notes


def _impossible(problem: str, args: Any, facts: Facts) -> Problem:
    """Return the problem of a value that no model can have, with the option that the value comes from."""
    run = args.run if isinstance(args, PlannedRun) else args
    for option in ("drafter", "mtp_graft_from"):
        if problem.startswith(f"{DRAFTER_KEY}: ") and getattr(run, option, None):
            name, why = f"--{option} {getattr(run, option)}", problem.removeprefix(f"{DRAFTER_KEY}: ")
            return f"{name} is not supported for --model {run.model}: {why}", "omit it to train MTP heads"
    where = config_directory(facts.directory) / "config.json"
    return f"--model: {where}: {problem}", "download config.json again"


def rules_of(args: Any) -> Any:
    """Return the module with the rules for the options `args`, which belongs to the command or to the training method.

    The module has RULES, which yield (problem, hint), and NOTES, which yield lines about settings without effect. The
    arguments of both are the options and `Facts`.
    """
    if isinstance(args, SftArgs):
        return method_of(args).load_rules()
    return _MODULES[type(args)]


_MODULES: dict[type, Any] = {
    ExportArgs: export,
    InferArgs: infer,
    RegenerateArgs: regenerate,
    SpeedupArgs: speedup,
    AdaptArgs: adapt,
    DeployArgs: deploy,
    EvaluateArgs: evaluate,
    BenchArgs: bench,
    DoctorArgs: doctor,
    PlannedRun: planned,
    ReportArgs: report,
}
