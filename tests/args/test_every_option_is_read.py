"""Test that the code of a command reads each of its options: as `args.NAME`, in a group, or as a model."""

import ast
import dataclasses
import functools
import re
from pathlib import Path

import pytest

import swiftlite
from swiftlite.args import data_fields, fields, serving_fields
from swiftlite.args.docs import options
from swiftlite.cli.table import commands
from swiftlite.engines.index import ENGINES
from swiftlite.hub.name import MODEL_OPTIONS

PACKAGE = Path(swiftlite.__file__).parent
OF_TRAINING = [
    *("train", "model", "cli/main.py"),
    *(
        "plan/run.py",
        "plan/best_metric.py",
        "plan/heads.py",
        "plan/layout.py",
        "plan/trainable.py",
        "plan/trunk.py",
        "families/drafters.py",
        "families/resolved.py",
    ),
]
READERS = {
    "megatron sft": OF_TRAINING,
    "megatron pt": OF_TRAINING,
    "megatron dpo": [*OF_TRAINING, "plan/preference.py"],
    "megatron rm": [*OF_TRAINING, "methods/rm.py"],
    "megatron grpo": [
        *(*OF_TRAINING, "plan/policy.py", "plan/distillation.py", "methods/grpo.py", "rollouts"),
        *("rewards/settings.py", "engines/engine.py"),
    ],
    "megatron gkd": [*OF_TRAINING, "plan/distillation.py", "methods/gkd.py", "rollouts", "engines/engine.py"],
    "export": ["export", "model", "plan/layout.py", "plan/quantization.py", "engines/prompts.py"],
    "infer": ["serve/infer.py", "engines"],
    "regenerate": ["improve/regenerate", "serve/infer.py", "engines"],
    "evaluate": ["serve/evaluate", "engines/prompts.py"],
    "speedup": ["improve/speedup", "improve/steps.py"],
    "adapt": ["improve/adapt", "improve/steps.py"],
    "bench": ["serve/bench", "args/commands.py"],
    "doctor": [
        "cli/doctor.py",
        "cli/installed.py",
        "cli/memory_plan.py",
        "cli/layout_plan.py",
        "engines",
    ],
    "report": ["report"],
    "deploy": ["serve/deploy.py", "engines"],
}
NAMES = {"args", "layout", "recompute", "distributed", "moe"}
# By a rule, exactly one of --to_hf and --to_mcore is given; the code reads the first. --plan selects the parser.
COMPLEMENTS = {"to_mcore", "plan"}


@functools.cache
def attributes_of_args(path: Path) -> set[str]:
    """Return every NAME of `args.NAME`, `run.args.NAME`, or of a group, in a file or in the files of a folder."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    return {
        node.attr
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in NAMES
    }


GROUPS = vars(data_fields) | vars(fields) | vars(serving_fields)


@functools.cache
def groups_of_args(path: Path) -> set[str]:
    """Return the fields of every GROUP in `group_of(args, GROUP)`, and of `layout_of(args)` and `models_in(args)`."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    calls = [
        ast.unparse(node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    groups = [name for call in calls for name in re.findall(r"^group_of\(args, (\w+)\)$", call)]
    groups += ["ParallelLayout" for call in calls if call == "layout_of(args)"]
    names = {field.name for group in groups for field in dataclasses.fields(GROUPS[group])}
    return names | set(MODEL_OPTIONS if {"models_in(args)", "resolve_options(args)"} & set(calls) else ())


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.words)
def test_every_option_has_a_reader(command):
    readers = [PACKAGE / reader for reader in READERS[command.words]]
    read = set().union(*map(attributes_of_args, readers), *map(groups_of_args, readers))
    if PACKAGE / "engines" in readers:
        for info in ENGINES.values():  # by `EngineInfo.engine_kwargs` and `speculative_config`
            read |= {info.kwargs_option, *info.option_names}
    if PACKAGE / "rollouts" in readers:
        read |= {info.kwargs_option for info in ENGINES.values()}  # by `rollouts.engine.engine_kwargs`
    assert sorted(set(options(command.args_class)) - read - COMPLEMENTS) == []
