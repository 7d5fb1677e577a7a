"""Rules of `evaluate`."""

import functools
from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import EvaluateArgs
from swiftlite.args.config import Problem, not_supported
from swiftlite.args.docs import options
from swiftlite.args.duration import seconds_of
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
        yield "--output_dir is required", "the results are written there: --output_dir evaluation"
    elif Path(args.output_dir).is_file():
        yield f"--output_dir {args.output_dir} is a file", "give a directory"


def confidences_are_probabilities(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    for value in args.draft_confidence:
        if not 0 <= value <= 1:
            yield f"--draft_confidence {value:g} must be at least 0 and at most 1", ""


def acceptance_json_gets_counts(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if args.acceptance_json is None:
        return
    yield from common.acceptance_json_exists(args, facts)
    if args.infer_backend == "none":
        yield "--acceptance_json requires --infer_backend", "add --infer_backend vllm"


def evaluate_settings_without_effect(args: EvaluateArgs, facts: Facts) -> Iterator[str]:
    no_engine = (args.infer_backend == "none", "--infer_backend is none")
    yield from common.without_effect(
        args, dict.fromkeys(("num_speculative_tokens", "max_prompts", "max_new_tokens", "temperature"), no_engine)
    )


def server_is_an_address(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if args.server is not None and not common.is_address(args.server):
        yield f"--server {args.server} is not an address", "give http://HOST:PORT, such as http://127.0.0.1:8000"


def server_has_no_model_options(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if args.server is not None:
        for name in common.changed(args, sorted(options(EvaluateArgs).keys() - _SERVER_OPTIONS)):
            yield not_supported(name, "evaluate --server", _COUNTERS_ONLY)


def since_is_a_duration_of_a_server(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if args.since is None:
        return
    if args.server is None:
        yield "--since requires --server", "add --server http://HOST:PORT, or remove --since"
    if not seconds_of(args.since):
        yield f"--since {args.since} is not a duration above 0", "give days, hours, minutes or seconds: --since 24h"


def _of_models(rule: common.Rule) -> common.Rule:
    """Return a rule that is not applied with --server, which has no model and no rows."""

    @functools.wraps(rule)
    def unless_server(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
        if args.server is None:
            yield from rule(args, facts)

    return unless_server


_SERVER_OPTIONS = {"server", "since", "output_dir"}
_COUNTERS_ONLY = "it only reads the counters of a running server"

_MODEL_RULES = (
    common.hf_model_is_a_directory,
    there_are_rows,
    there_are_heads,
    common.baseline_is_a_model,
    confidences_are_probabilities,
    acceptance_json_gets_counts,
    engine_options.engine_is_installed,
    engine_options.engine_runs_the_family,
    engine_options.draft_confidence_has_its_engine,
    common.images_have_a_place_and_a_size,
)
RULES = (
    *map(_of_models, _MODEL_RULES),
    output_dir_can_be,
    common.numbers_are_in_range,
    server_is_an_address,
    server_has_no_model_options,
    since_is_a_duration_of_a_server,
)
NOTES = (evaluate_settings_without_effect,)
