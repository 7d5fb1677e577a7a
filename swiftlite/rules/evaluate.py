"""Rules of `evaluate`."""

from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import EvaluateArgs
from swiftlite.engines.index import ENGINES
from swiftlite.heads import DEPTH_KEY
from swiftlite.plan.facts import Facts, Problem
from swiftlite.rules.common import (
    DATA_SUFFIXES,
    file_problems,
    hf_model_is_a_directory,
    numbers_are_in_range,
    without_effect,
)
from swiftlite.rules.engine import missing_engine


def there_are_rows(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if not args.dataset:
        yield "--dataset is required", "give files of rows that the model was not trained on: --dataset val.jsonl"
    for name in args.dataset:
        yield from file_problems("--dataset", name, DATA_SUFFIXES)


def there_are_heads(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if facts.hf_config and not facts.heads.layers:
        yield (
            f"{Path(args.model) / 'config.json'} promises no MTP layer ({DEPTH_KEY}): there is nothing to measure",
            "train heads first: swiftlite megatron sft --mtp_num_layers 1",
        )


def baseline_is_a_model(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if args.baseline is not None and not (Path(args.baseline) / "config.json").is_file():
        yield f"--baseline {args.baseline} has no config.json", "give the directory of a Hugging Face model"


def output_dir_can_be(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if not args.output_dir:
        yield "--output_dir is required", "evaluation.json and evaluation.svg go there: --output_dir evaluation"
    elif Path(args.output_dir).is_file():
        yield f"--output_dir {args.output_dir} is a file", "name a directory"


def engine_is_there(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if args.infer_backend in ENGINES:
        yield from missing_engine(ENGINES[args.infer_backend])


def evaluate_settings_without_effect(args: EvaluateArgs, facts: Facts) -> Iterator[str]:
    no_engine = (args.infer_backend == "none", "--infer_backend is none")
    yield from without_effect(
        args, dict.fromkeys(("num_speculative_tokens", "max_prompts", "max_new_tokens"), no_engine)
    )


RULES = (
    hf_model_is_a_directory,
    there_are_rows,
    there_are_heads,
    baseline_is_a_model,
    output_dir_can_be,
    numbers_are_in_range,
    engine_is_there,
)
NOTES = (evaluate_settings_without_effect,)
