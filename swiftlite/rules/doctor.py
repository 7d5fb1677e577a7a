"""Rules of `doctor`."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import DoctorArgs
from swiftlite.args.docs import options
from swiftlite.args.fields import VllmArgs
from swiftlite.plan.facts import Facts, Problem, near_path
from swiftlite.plan.layout import layout_of, layout_problems, process_problems
from swiftlite.plan.memory import planned_setup
from swiftlite.rules.common import (
    as_typed,
    numbers_are_in_range,
    recompute_options_fit,
    speculative_tokens_are_given_once,
)
from swiftlite.rules.engine import missing_engine


def model_to_audit_is_a_directory(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.model is not None and not Path(args.model).is_dir():
        path = Path(args.model)
        yield f"--model {path} is no directory", near_path(path) if not path.exists() else ""


OF_VLLM = tuple(field.name for field in dataclasses.fields(VllmArgs))
OF_ENGINE = ("trust_remote_code", "torch_dtype", "num_speculative_tokens", *OF_VLLM)


def plan_options_have_plan(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.plan:
        return
    for name, option in options(DoctorArgs).items():
        if name not in ("model", "plan", "engine", *OF_ENGINE) and getattr(args, name) != option.default:
            yield f"--{name} {as_typed(getattr(args, name))} without a plan", "add --plan"


def engine_options_have_engine(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.engine and args.plan:
        yield "--engine and --plan are two different questions", "ask one at a time"
    if args.engine and args.model is None:
        yield f"--engine {args.engine} needs a model", "add --model DIRECTORY, a Hugging Face model's"
    if args.engine == "vllm":  # of SGLang enough is known to do without
        yield from missing_engine("vllm", "engine")
    for name in OF_ENGINE:
        value = getattr(args, name)
        if value == options(DoctorArgs)[name].default or (name == "torch_dtype" and args.plan):
            continue
        if args.engine is None:
            yield f"--{name} {as_typed(value)} without an engine", "add --engine vllm"
        elif args.engine != "vllm" and name in OF_VLLM:
            yield f"--{name} {as_typed(value)} with --engine {args.engine}", "it is for --engine vllm"


def plan_fits_the_model(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan:
        return
    if args.model is None:
        yield "--plan needs a model", "add --model DIRECTORY, a Hugging Face model's; its config.json is enough"
    elif Path(args.model).is_dir() and not facts.hf_config:
        yield f"--model {args.model} has no config.json that holds a JSON object", "give a Hugging Face model's"
    if any(True for _ in numbers_are_in_range(args, facts)) or not facts.hf_config:
        return  # the plan has nothing to stand on; this or another rule says so
    layout = layout_of(args)
    setup = planned_setup(args, facts.hf_config)
    yield from layout_problems(layout, facts.architecture, setup.heads.layers)
    for problem, _ in process_problems(layout, setup.num_gpus):
        yield f"--num_gpus {args.num_gpus}: {problem}", "leave --num_gpus out for the fewest that this layout takes"


RULES = (
    model_to_audit_is_a_directory,
    numbers_are_in_range,
    plan_options_have_plan,
    engine_options_have_engine,
    speculative_tokens_are_given_once,
    plan_fits_the_model,
    recompute_options_fit,
)
