"""The rules that options keep, checked before torch loads; may use `args`, `plan` and what lies in small files.

A rule is a small function with the rule's name that yields (problem, hint) in the user's words. `check` runs all rules
of a command and reports every problem together. A setting that is merely without effect is a note, not a problem. One
file per command, `sft_*.py` for the subjects of the largest; `common.py` for what they share.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swiftlite.args.commands import BenchArgs, DeployArgs, DoctorArgs, EvaluateArgs, ExportArgs, InferArgs, SftArgs
from swiftlite.errors import OptionError
from swiftlite.plan.facts import Facts, Problem, config_directory, read_hf_config
from swiftlite.rules import bench, deploy, doctor, evaluate, export, infer, sft


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
    problems: list[Problem] = list(paths_cannot_be(args))
    if problems:  # no rule could look at them
        raise OptionError(problems)
    facts = Facts(world_size, read_hf_config(config_directory(Path(args.model))) if args.model else {})
    for rule in _RULES[type(args)]:
        problems += rule(args, facts)
    if problems:
        raise OptionError(problems)
    notes: list[str] = []
    for rule in _NOTES.get(type(args), ()):
        notes += rule(args, facts)
    return notes


def paths_cannot_be(args: Any) -> Iterator[Problem]:
    """Texts that no operating system takes for a path: with a NUL in them (from a file of options), or too long."""
    for name, value in vars(args).items():
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            if "\0" in text:
                yield f"--{name} {text!r} has a NUL character", "leave it out"
            elif name in _PATHS and _is_too_long(text):
                yield f"--{name} {text[:60]}... is too long for a path", "name a shorter one"


def _is_too_long(path: str) -> bool:
    """Whether Linux refuses it: names up to 255 bytes, paths up to 4095."""
    encoded = os.fsencode(path)
    return len(encoded) > 4095 or max(map(len, encoded.split(b"/"))) > 255


_PATHS = ("model", "output_dir", "dataset", "val_dataset", "mtp_graft_from", "baseline", "result_path")
_RULES: dict[type, tuple[Callable[[Any, Facts], Iterator[Problem]], ...]] = {
    SftArgs: sft.RULES,
    ExportArgs: export.RULES,
    InferArgs: infer.RULES,
    DeployArgs: deploy.RULES,
    EvaluateArgs: evaluate.RULES,
    BenchArgs: bench.RULES,
    DoctorArgs: doctor.RULES,
}
_NOTES: dict[type, tuple[Callable[[Any, Facts], Iterator[str]], ...]] = {
    ExportArgs: export.NOTES,
    SftArgs: sft.NOTES,
    InferArgs: infer.NOTES,
    EvaluateArgs: evaluate.NOTES,
}
