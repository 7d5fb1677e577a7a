"""Rules of `evaluate`."""

from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import EvaluateArgs
from swiftlite.args.config import Problem
from swiftlite.plan.facts import Facts
from swiftlite.rules import common, engine_options


def there_are_rows(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if not args.dataset:
        yield "--dataset is required", "give files with rows that the model was not trained on: --dataset val.jsonl"
    for name in args.dataset:
        yield from common.file_problems("--dataset", name)


def there_are_heads(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if facts.hf_config and not facts.heads.layers:
        yield common.no_heads(facts), common.TRAIN_HEADS


def output_dir_can_be(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if not args.output_dir:
        yield "--output_dir is required", "evaluation.json, .svg and .html are written there: --output_dir evaluation"
    elif Path(args.output_dir).is_file():
        yield f"--output_dir {args.output_dir} is a file", "give a directory"


def confidences_are_probabilities(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    for value in args.draft_confidence:
        if not 0 <= value <= 1:
            yield f"--draft_confidence {value:g} must be at least 0 and at most 1", ""


def evaluate_settings_without_effect(args: EvaluateArgs, facts: Facts) -> Iterator[str]:
    no_engine = (args.infer_backend == "none", "--infer_backend is none")
    yield from common.without_effect(
        args, dict.fromkeys(("num_speculative_tokens", "max_prompts", "max_new_tokens", "temperature"), no_engine)
    )


RULES = (
    common.hf_model_is_a_directory,
    there_are_rows,
    there_are_heads,
    common.baseline_is_a_model,
    output_dir_can_be,
    confidences_are_probabilities,
    common.numbers_are_in_range,
    engine_options.engine_is_installed,
    engine_options.draft_confidence_has_its_engine,
)
NOTES = (evaluate_settings_without_effect,)
