"""Rules of `deploy`."""

from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import DeployArgs
from swiftlite.engines.index import ENGINES
from swiftlite.heads import DEPTH_KEY
from swiftlite.plan.facts import Facts, Problem
from swiftlite.rules.common import hf_model_is_a_directory, numbers_are_in_range
from swiftlite.rules.engine import (
    engine_kwargs_leave_what_has_an_option,
    given_of_speculation,
    missing_engine,
    options_have_their_engine,
    options_of_engines_agree,
)

OR_PRINT_IT = ", or add --dry_run"


def engine_is_installed(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    info = ENGINES[args.infer_backend]
    if info.prints_anywhere and args.dry_run:
        return
    for problem, hint in missing_engine(info):
        yield problem, hint + OR_PRINT_IT if info.prints_anywhere else hint


def speculation_has_heads(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    config = Path(args.model) / "config.json"
    if not facts.hf_config or facts.heads.layers:
        return
    train = "train heads first: swiftlite megatron sft --mtp_num_layers 1"
    if args.speculative == "mtp":
        yield f"--speculative mtp, but {config} promises no MTP layer ({DEPTH_KEY})", f"leave it out, or {train}"
    elif args.speculative is None:
        for name in given_of_speculation(args):
            yield f"--{name}, but {config} promises no MTP layer ({DEPTH_KEY})", f"leave it out, or {train}"


def speculative_options_have_speculation(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    if args.speculative == "none":
        for name in given_of_speculation(args):
            yield f"--{name} with --speculative none", "leave one of them out"


RULES = (
    hf_model_is_a_directory,
    numbers_are_in_range,
    engine_is_installed,
    options_have_their_engine,
    speculation_has_heads,
    speculative_options_have_speculation,
    options_of_engines_agree,
    engine_kwargs_leave_what_has_an_option,
)
