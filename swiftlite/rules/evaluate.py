"""Rules of `evaluate`."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import EvaluateArgs
from swiftlite.args.config import Problem, not_supported
from swiftlite.args.docs import options
from swiftlite.args.duration import seconds_of
from swiftlite.args.serving_fields import TaskArgs
from swiftlite.engines.index import ENGINES, names_with
from swiftlite.plan.facts import Facts
from swiftlite.rules import common, engine_options
from swiftlite.runtime import lm_eval


def there_are_rows(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if not args.dataset:
        yield "--dataset is required", "give files with rows that the model was not trained on: --dataset val.jsonl"
    for name in args.dataset:
        yield from common.file_problems("--dataset", name)


def there_are_heads(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if facts.hf_config and not facts.heads.layers:
        yield common.no_heads(facts), common.TRAIN_HEADS


def drafter_has_its_engine(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if args.infer_backend in ENGINES:
        yield from engine_options.drafter_problems(args.infer_backend, facts)


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
    if args.tasks:
        return
    no_engine = (args.infer_backend == "none", "--infer_backend is none")
    yield from common.without_effect(
        args, dict.fromkeys(("num_speculative_tokens", "max_prompts", "max_new_tokens", "temperature"), no_engine)
    )


def server_is_an_address(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if args.server is not None and not common.is_address(args.server):
        yield f"--server {args.server} is not an address", "give http://HOST:PORT, such as http://127.0.0.1:8000"


def server_has_no_model_options(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if args.server is not None and not args.tasks:
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
    """Return a rule that is not applied with --server, which has no model and no rows, and with --tasks."""

    @functools.wraps(rule)
    def unless_server(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
        if args.server is None and not args.tasks:
            yield from rule(args, facts)

    return unless_server


def _of_tasks(rule: common.Rule) -> common.Rule:
    """Return a rule that is applied only with --tasks."""

    @functools.wraps(rule)
    def with_tasks(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
        if args.tasks:
            yield from rule(args, facts)

    return with_tasks


def lm_eval_is_installed(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if not lm_eval.LM_EVAL.is_installed:
        problem = f"--tasks requires lm-evaluation-harness in a separate environment, {lm_eval.LM_EVAL.directory}"
        yield problem, lm_eval.install_command()


def tasks_are_names(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    """Reject paths. lm-eval would look for them in its current directory."""
    for task in args.tasks:
        if not _TASK_NAME.fullmatch(task):
            yield f"--tasks {task} is not the name of a task", "add its directory with --include_path DIR"


def include_path_is_a_directory(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if args.include_path is not None and not Path(args.include_path).is_dir():
        yield f"--include_path {args.include_path} is not a directory", "give the directory of the task files"


def engine_answers_tasks(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    info = ENGINES[args.task_engine]
    able = " or ".join(names_with("measures_requests"))
    if args.server is not None:
        return
    if info.measures_requests:
        yield from engine_options.missing_engine(info)
    else:
        yield (
            f"--tasks does not support --infer_backend {info.name}: the log-probabilities of prompts of {info.label}'s "
            "server were not tested",
            f"use --infer_backend {able}",
        )


def drafts_have_heads(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if facts.hf_config and not facts.heads.layers and args.server is None:
        for name in common.changed(args, ["compare", "num_speculative_tokens"]):
            yield f"--{name} requires MTP heads; {common.no_heads(facts)}", f"remove it, or {common.TRAIN_HEADS}"


def options_are_of_tasks(args: EvaluateArgs, facts: Facts) -> Iterator[Problem]:
    if not args.tasks:
        for name in common.changed(args, options(TaskArgs)):
            yield f"--{name} requires --tasks", f"add --tasks gsm8k, or remove --{name}"
        return
    allowed = {*options(TaskArgs), *_OF_TASKS}
    if args.server is not None:
        allowed -= {"baseline", "compare", "infer_backend", "torch_dtype", "num_speculative_tokens"}
    for name in common.changed(args, sorted(options(EvaluateArgs).keys() - allowed)):
        command = "evaluate --tasks --server" if args.server is not None else "evaluate --tasks"
        yield not_supported(name, command, "it only sends the questions of tasks to a server")


_TASK_NAME = re.compile(r"[A-Za-z0-9_][\w.:+()-]*(?<!\.yaml)")
_OF_TASKS = (
    *("model", "torch_dtype", "trust_remote_code", "baseline", "output_dir", "infer_backend", "num_speculative_tokens"),
    *("max_length", "server"),
)
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
    drafter_has_its_engine,
    engine_options.draft_confidence_has_its_engine,
    common.images_have_a_place_and_a_size,
)
_TASK_RULES = (
    common.hf_model_is_a_directory,
    common.baseline_is_a_model,
    lm_eval_is_installed,
    tasks_are_names,
    include_path_is_a_directory,
    engine_answers_tasks,
    engine_options.engine_runs_the_family,
    drafts_have_heads,
    drafter_has_its_engine,
)
RULES = (
    *map(_of_models, _MODEL_RULES),
    *map(_of_tasks, _TASK_RULES),
    options_are_of_tasks,
    output_dir_can_be,
    common.numbers_are_in_range,
    server_is_an_address,
    server_has_no_model_options,
    since_is_a_duration_of_a_server,
)
NOTES = (evaluate_settings_without_effect,)
