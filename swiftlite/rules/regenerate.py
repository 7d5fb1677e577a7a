"""Rules of `regenerate`."""

from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import RegenerateArgs, SpeedupArgs
from swiftlite.args.config import Problem
from swiftlite.args.data_file import split_sample
from swiftlite.plan.facts import Facts
from swiftlite.rules import common, engine_options, infer


def there_are_rows(args: RegenerateArgs, facts: Facts) -> Iterator[Problem]:
    if not args.dataset and not args.self_prompts:
        hint = "give files whose answers to regenerate, or let the model write prompts: --self_prompts 1000"
        yield "--dataset or --self_prompts is required", hint
    for name in args.dataset:
        yield from common.file_problems("--dataset", name)


def dataset_is_not_the_result(args: RegenerateArgs | SpeedupArgs, facts: Facts) -> Iterator[Problem]:
    if not args.output_dir:
        return
    directory = Path(args.output_dir).resolve()
    for name in args.dataset:
        if Path(split_sample(name)[0]).resolve().parent == directory:
            yield f"--dataset {name} is in --output_dir {args.output_dir}", "use another --output_dir"


def answers_can_differ(args: RegenerateArgs, facts: Facts) -> Iterator[Problem]:
    if args.num_answers > 1 and args.temperature == 0:
        problem = f"--num_answers {args.num_answers} requires --temperature above 0: greedy answers are identical"
        yield problem, "add --temperature 0.7, or remove --num_answers"


def options_of_self_prompts_have_them(args: RegenerateArgs, facts: Facts) -> Iterator[Problem]:
    if args.self_prompts:
        return
    for name in common.changed(args, ("self_turns", "topics", "openings", "max_prompt_tokens")):
        yield f"--{name} requires --self_prompts", f"add --self_prompts 1000, or remove --{name}"


def share_has_openings(args: RegenerateArgs, facts: Facts) -> Iterator[Problem]:
    if args.openings is None and common.changed(args, ("openings_share",)):
        yield "--openings_share requires --openings", "add --openings builtin, or remove --openings_share"


RULES = (
    common.hf_model_is_a_directory,
    there_are_rows,
    common.output_dir_is_given,
    dataset_is_not_the_result,
    common.numbers_are_in_range,
    answers_can_differ,
    options_of_self_prompts_have_them,
    share_has_openings,
    infer.speculation_has_heads,
    infer.speculative_options_have_speculation,
    engine_options.options_of_engines_agree,
    engine_options.engine_is_installed,
    engine_options.engine_runs_the_family,
    engine_options.draft_confidence_has_its_engine,
    engine_options.ngrams_have_their_engine,
    engine_options.drafter_has_its_engine,
    engine_options.options_have_their_engine,
    engine_options.engine_kwargs_leave_what_has_an_option,
    common.images_have_a_place_and_a_size,
)
NOTES = (infer.settings_without_effect, infer.length_is_the_models)
