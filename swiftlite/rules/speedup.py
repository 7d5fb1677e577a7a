"""Rules of `speedup`."""

from collections.abc import Iterator

from swiftlite.args.commands import SpeedupArgs
from swiftlite.args.config import Problem
from swiftlite.args.duration import seconds_of
from swiftlite.base.heads import MTP
from swiftlite.engines.index import ENGINES
from swiftlite.families import FAMILIES
from swiftlite.plan.facts import Facts
from swiftlite.rules import common, engine_options, regenerate

MIN_MINUTES = 5
MAX_CONCURRENCY = 16
"""Maximum number of concurrent requests. Each has a different held-out prompt (`held_out.MIN_HELD_OUT`)."""


def budget_suffices(args: SpeedupArgs, facts: Facts) -> Iterator[Problem]:
    seconds = seconds_of(args.budget)
    if seconds is None:
        yield (
            f"--budget {args.budget} is not a duration",
            "write numbers with units d, h, m or s and no spaces: --budget 1h30m",
        )
    elif seconds < 60 * MIN_MINUTES:
        yield f"--budget {args.budget} is too short: starting the engine takes minutes", f"use at least {MIN_MINUTES}m"


def dataset_files_exist(args: SpeedupArgs, facts: Facts) -> Iterator[Problem]:
    for name in args.dataset:
        yield from common.file_problems("--dataset", name)


def concurrency_can_be(args: SpeedupArgs, facts: Facts) -> Iterator[Problem]:
    numbers = args.concurrency
    text = ",".join(map(str, numbers))
    if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        yield f"--concurrency {text}: numbers must be at least 1 and must not repeat", "for example --concurrency 1,8"
    elif max(numbers) > MAX_CONCURRENCY:
        problem = (
            f"--concurrency {text}: numbers must not exceed {MAX_CONCURRENCY}, the smallest number of held-out prompts"
        )
        yield problem, f"use --concurrency 1,{MAX_CONCURRENCY}, and swiftlite bench for more"


def share_has_a_dataset(args: SpeedupArgs, facts: Facts) -> Iterator[Problem]:
    if args.dataset:
        return
    for name in common.changed(args, ("self_prompts_share",)):
        yield f"--{name} requires --dataset", f"add --dataset FILE, or remove --{name}"


def heads_can_be_trained(args: SpeedupArgs, facts: Facts) -> Iterator[Problem]:
    if facts.heads.features:
        problem = f"--model declares the drafter {facts.heads.kind!r}, which speedup does not train"
        yield problem, "use swiftlite megatron sft, or the model without the drafter"


def drafter_fits_the_engine(args: SpeedupArgs, facts: Facts) -> Iterator[Problem]:
    family = FAMILIES.get(str(facts.hf_config.get("model_type")))
    if family is None or facts.architecture is None or args.infer_backend not in ENGINES:
        return
    if facts.heads.features:  # which `heads_can_be_trained` reports
        return
    if args.drafter in (MTP, "auto"):
        if reason := ENGINES[args.infer_backend].why_no_drafts(family, facts.hf_config):
            problem = f"--infer_backend {args.infer_backend} does not draft with MTP heads of this model: {reason}"
            yield problem, "use --infer_backend vllm"
        return
    if reason := ENGINES[args.infer_backend].why_no_drafter(family, facts.hf_config, args.drafter):
        yield f"--drafter {args.drafter} is not possible for this model: {reason}", "use --drafter mtp"
    elif facts.heads.layers:
        yield f"--drafter {args.drafter}: --model has MTP heads already", "use --drafter mtp, which trains them further"


RULES = (
    common.hf_model_is_a_directory,
    common.output_dir_is_given,
    common.numbers_are_in_range,
    budget_suffices,
    dataset_files_exist,
    share_has_a_dataset,
    heads_can_be_trained,
    drafter_fits_the_engine,
    concurrency_can_be,
    regenerate.dataset_is_not_the_result,
    engine_options.engine_is_installed,
    engine_options.engine_runs_the_family,
)
NOTES = ()
