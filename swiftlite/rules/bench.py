"""Rules of `bench`, including those of `deploy` for the servers that it starts."""

from collections.abc import Iterator

from swiftlite.args.commands import BenchArgs, deploy_args
from swiftlite.args.config import Problem
from swiftlite.args.serving_fields import WITH_HEADS
from swiftlite.engines.index import ENGINES
from swiftlite.plan.facts import Facts
from swiftlite.rules import common, deploy, engine_options


def there_are_prompts(args: BenchArgs, facts: Facts) -> Iterator[Problem]:
    if not args.val_dataset:
        yield "--val_dataset is required", "give files with prompts like those in production: --val_dataset FILE"


def numbers_of_tokens_can_be_compared(args: BenchArgs, facts: Facts) -> Iterator[Problem]:
    numbers = args.num_speculative_tokens
    text = ",".join(map(str, numbers))
    if min(numbers, default=0) < 0:
        yield f"--num_speculative_tokens {text}: {min(numbers)} is negative", "for example --num_speculative_tokens 0,1"
    if len(set(numbers)) < len(numbers):
        yield f"--num_speculative_tokens {text} contains a number twice", "use --rounds to repeat measurements"
    if 0 not in numbers or len(set(numbers)) < 2:
        yield (
            f"--num_speculative_tokens {text}: bench compares decoding with and without drafts",
            "give 0 and at least one other number: --num_speculative_tokens 0,1",
        )


def concurrency_can_be(args: BenchArgs, facts: Facts) -> Iterator[Problem]:
    numbers = args.concurrency
    text = ",".join(map(str, numbers))
    if not numbers or min(numbers) < 1:
        yield f"--concurrency {text} must contain numbers of at least 1", "for example --concurrency 1,8"
    if len(set(numbers)) < len(numbers):
        yield f"--concurrency {text} contains a number twice", "use --rounds to repeat measurements"
    if args.max_prompts < max(numbers, default=0):
        yield (
            f"--concurrency {max(numbers)} must not exceed --max_prompts {args.max_prompts}",
            f"use --max_prompts {4 * max(numbers)}",
        )


def bench_has_heads(args: BenchArgs, facts: Facts) -> Iterator[Problem]:
    if args.speculative in WITH_HEADS and facts.hf_config and not facts.heads.layers:
        yield common.no_heads(facts), common.TRAIN_HEADS


def speculative_config_leaves_the_number(args: BenchArgs, facts: Facts) -> Iterator[Problem]:
    for info in ENGINES.values():
        if "num_speculative_tokens" in (info.speculative_config(args) or {}):
            yield (
                f"--{info.name}_speculative_config contains num_speculative_tokens, which bench sets",
                "remove it there and use --num_speculative_tokens",
            )


def deploy_would_start_them(args: BenchArgs, facts: Facts) -> Iterator[Problem]:
    drafting = max(args.num_speculative_tokens, default=0)
    if drafting > 0 and (facts.heads.layers or args.speculative not in WITH_HEADS):
        options = deploy_args(args, drafting)
        for problem, hint in deploy.engine_is_installed(options, facts):
            yield problem, hint.removesuffix(deploy.OR_PRINT_IT)
        yield from engine_options.options_have_their_engine(options, facts)
        yield from engine_options.engine_runs_the_family(options, facts)
        yield from engine_options.engine_kwargs_leave_what_has_an_option(options, facts)
        yield from engine_options.ngrams_have_their_engine(options, facts)
        for problem, hint in engine_options.drafter_has_its_engine(options, facts):
            yield problem, hint.removesuffix(engine_options.OR_NO_DRAFTS)


RULES = (
    common.hf_model_is_a_directory,
    there_are_prompts,
    common.val_dataset_files_exist,
    common.media_root_is_a_directory,
    common.output_dir_is_given,
    common.numbers_are_in_range,
    numbers_of_tokens_can_be_compared,
    concurrency_can_be,
    bench_has_heads,
    speculative_config_leaves_the_number,
    deploy_would_start_them,
)
NOTES = (engine_options.float32_can_be_faster,)
