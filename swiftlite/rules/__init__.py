"""The rules that options keep, checked before torch loads; may use `args`, `plan` and what lies in small files.

A rule is a small function with the rule's name that yields (problem, hint) in the user's words. `check` runs all rules
of a command and reports every problem together. A setting that is merely without effect is a note, not a problem. One
file per command, `sft_*.py` for the subjects of the largest; `common.py` for what they share.
"""

from collections.abc import Callable, Iterator
from typing import Any

from swiftlite.args.commands import (
    BenchArgs,
    DeployArgs,
    DoctorArgs,
    DpoArgs,
    EvaluateArgs,
    ExportArgs,
    InferArgs,
    PtArgs,
    RegenerateArgs,
    ReportArgs,
    SftArgs,
)
from swiftlite.args.config import Problem
from swiftlite.errors import OptionError
from swiftlite.families.index import impossible_values
from swiftlite.plan.facts import Facts, read_hf_config
from swiftlite.rules import bench, common, deploy, doctor, dpo, evaluate, export, infer, pt, regenerate, report, sft


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
    directory = common.directory_of_model(args)
    facts = Facts(world_size, read_hf_config(directory) if directory else {})
    if directory and (found := impossible_values(facts.hf_config)):  # nor can a rule count with these
        where = directory / "config.json"
        raise OptionError([(f"{where}: {problem}", "copy it from the model's source again") for problem in found])
    for rule in _RULES[type(args)]:
        problems += rule(args, facts)
    if problems:
        raise OptionError(problems)
    notes: list[str] = []
    for rule in _NOTES.get(type(args), ()):
        notes += rule(args, facts)
    return notes


_RULES: dict[type, tuple[Callable[[Any, Facts], Iterator[Problem]], ...]] = {
    SftArgs: sft.RULES,
    PtArgs: pt.RULES,
    DpoArgs: dpo.RULES,
    ExportArgs: export.RULES,
    InferArgs: infer.RULES,
    RegenerateArgs: regenerate.RULES,
    DeployArgs: deploy.RULES,
    EvaluateArgs: evaluate.RULES,
    BenchArgs: bench.RULES,
    DoctorArgs: doctor.RULES,
    ReportArgs: report.RULES,
}
_NOTES: dict[type, tuple[Callable[[Any, Facts], Iterator[str]], ...]] = {
    ExportArgs: export.NOTES,
    SftArgs: sft.NOTES,
    PtArgs: pt.NOTES,
    DpoArgs: dpo.NOTES,
    InferArgs: infer.NOTES,
    RegenerateArgs: regenerate.NOTES,
    EvaluateArgs: evaluate.NOTES,
}
