"""Rules of `doctor`."""

from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.command_line import shell_line
from swiftlite.args.commands import DoctorArgs, PlanArgs
from swiftlite.args.config import Problem
from swiftlite.args.docs import options
from swiftlite.engines.index import ENGINES, names_with
from swiftlite.engines.info import EngineInfo
from swiftlite.plan.facts import Facts, near_path
from swiftlite.rules import common, engine_options


def model_to_audit_is_a_directory(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.model is not None and not facts.directory.is_dir():
        path = Path(args.model)
        hint = "give the directory of a Hugging Face model"
        if not path.exists():
            hint = near_path(path) or hint
        yield f"--model {path} is not a directory", hint


# Options that --engine uses with every engine; all other ones belong to one engine.
OF_ENGINES = ("trust_remote_code", "torch_dtype", "num_speculative_tokens")


def owners() -> dict[str, EngineInfo]:
    """Return the engine of each option of doctor that belongs to one engine, by option name."""
    known = options(DoctorArgs)
    found = {}
    for info in ENGINES.values():
        found |= {name: info for name in info.option_names if name in known}
    return found


def plan_options_have_plan(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    for name in common.changed(args, options(PlanArgs)):
        yield f"--{name} {shell_line(getattr(args, name))} requires --plan", "add --plan"


def engine_options_have_engine(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.engine and args.model is None:
        yield f"--engine {args.engine} requires --model", "add --model DIRECTORY"
    if args.engine and not ENGINES[args.engine].known_report:
        yield from engine_options.missing_engine(ENGINES[args.engine], "engine")
    own = owners()
    for name in (*OF_ENGINES, *own):
        value = getattr(args, name)
        if value == options(DoctorArgs)[name].default:
            continue
        owner = args.engine or names_with("dry_load")[0]
        if name in own:
            owner = own[name].name
        if args.engine is None:
            yield f"--{name} {shell_line(value)} requires --engine {owner}", f"add --engine {owner}"
        elif args.engine != owner:
            problem = f"--{name} {shell_line(value)} is not supported with --engine {args.engine}"
            yield problem, f"use --engine {owner}, or remove --{name}"


RULES = (
    model_to_audit_is_a_directory,
    common.numbers_are_in_range,
    plan_options_have_plan,
    engine_options_have_engine,
    engine_options.options_of_engines_agree,
)
NOTES = ()
