"""The rules that options keep, checked before torch loads; may use `args`, `plan` and what lies in small files.

A rule is a small function with the rule's name that yields (problem, hint) in the user's words. `check` runs all rules
of a command and reports every problem together. A setting that is merely without effect is a note, not a problem. One
file per command, `sft_*.py` for the subjects of the largest; `common.py` for what they share.
"""

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
from swiftlite.args.config import Problem
from swiftlite.errors import OptionError
from swiftlite.families.index import impossible_values
from swiftlite.methods.index import method_of
from swiftlite.plan.facts import config_directory, read_facts
from swiftlite.rules import bench, common, deploy, doctor, evaluate, export, infer, regenerate, report


def check(args: Any, world_size: int = 1) -> list[str]:
    """Run every rule of the command that these arguments belong to.

    Args:
        args: an instance of one of the command classes.
        world_size: processes of the run.

    Returns:
        Notes: settings that have no effect, and why.

    Raises:
        OptionError: every problem found.
    """
    problems: list[Problem] = list(common.texts_can_be(args))
    if problems:  # no rule could look at them
        raise OptionError(problems)
    facts = read_facts(args, world_size)
    if found := impossible_values(facts.hf_config):  # nor can a rule count with these
        where = config_directory(facts.directory) / "config.json"
        raise OptionError([(f"{where}: {problem}", "copy it from the model's source again") for problem in found])
    module = rules_of(args)
    for rule in module.RULES:
        problems += rule(args, facts)
    if problems:
        raise OptionError(problems)
    notes: list[str] = []
    for rule in module.NOTES:
        notes += rule(args, facts)
    return notes


def rules_of(args: Any) -> Any:
    """Return the module with RULES and NOTES of the command, or of the training method, that these options belong to.

    RULES yield a problem and a hint, NOTES a line about a setting without effect; both take the options and `Facts`.
    """
    return method_of(args).load_rules() if isinstance(args, SftArgs) else _MODULES[type(args)]


_MODULES: dict[type, Any] = {
    ExportArgs: export,
    InferArgs: infer,
    RegenerateArgs: regenerate,
    DeployArgs: deploy,
    EvaluateArgs: evaluate,
    BenchArgs: bench,
    DoctorArgs: doctor,
    ReportArgs: report,
}
