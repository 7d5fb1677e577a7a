"""Parse options of `doctor --plan` as the command line does, and print the plan."""

import json
from typing import Any

from swiftlite import rules
from swiftlite.args.command_line import shell_line
from swiftlite.args.commands import PlannedRun
from swiftlite.cli import doctor
from swiftlite.cli.parse import parse
from swiftlite.cli.planned import planned_command, separate
from swiftlite.cli.table import find
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.facts import read_facts
from swiftlite.plan.heads import with_source_of_heads
from swiftlite.plan.run import plan_of

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
}


def planned(**options: Any) -> PlannedRun:
    """Return the parsed options of `doctor --plan`."""
    argv = ["--plan"]
    for name, value in options.items():
        if value is None:
            continue
        words = [json.dumps(value)] if isinstance(value, dict) else shell_line(value).split()
        argv += [f"--{name}", *words]
    return parsed(argv)


def parsed(argv: list[str]) -> Any:
    """Return the parsed arguments of `doctor`."""
    command = planned_command(find(["doctor"])[0], argv)
    args, _ = parse(command.args_class, argv, command.words, command.choices())
    return separate(args)


def setup_of(args: PlannedRun) -> Setup:
    """Return the setup of a planned run without images."""
    facts = read_facts(args)
    run = with_source_of_heads(args.run, facts.heads)
    return Setup.of(run, plan_of(run, facts))


def plan(capsys: Any, **options: Any) -> tuple[int, list[str]]:
    """Check and print a plan; return its exit code and lines."""
    args = planned(**options)
    rules.check(args)
    return doctor.run(args), capsys.readouterr().out.splitlines()
