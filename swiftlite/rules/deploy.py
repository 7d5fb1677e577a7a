"""Rules of `deploy`."""

import os
from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import DeployArgs
from swiftlite.args.config import Problem
from swiftlite.args.serving_fields import WITH_HEADS
from swiftlite.engines.index import ENGINES
from swiftlite.hub.name import served_name
from swiftlite.plan.facts import Facts
from swiftlite.plan.layout import choices
from swiftlite.rules import common, engine_options

OR_PRINT_IT = ", or add --dry_run"
HERE = ("127.0.0.1", "localhost", "::1")


def engine_is_installed(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    info = ENGINES[args.infer_backend]
    if info.command_needs_no_install and args.dry_run:
        return
    for problem, hint in engine_options.missing_engine(info):
        if info.command_needs_no_install:
            hint += OR_PRINT_IT
        yield problem, hint


def given_of_drafting(args: DeployArgs) -> list[str]:
    """Return the names of the options for drafting that the user gave."""
    names = list(engine_options.given_of_speculation(args))
    if args.draft_schedule is not None:
        names.insert(0, "draft_schedule")
    return names


def speculation_has_heads(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    if not facts.hf_config or facts.heads.layers:
        return
    why = common.no_heads(facts)
    hint = f"remove it, or {common.TRAIN_HEADS}"
    if args.speculative in WITH_HEADS:
        yield f"--speculative {args.speculative} requires MTP heads; {why}", hint
    elif args.speculative is None:
        for name in given_of_drafting(args):
            yield f"--{name} requires MTP heads; {why}", hint


def speculative_options_have_speculation(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    if args.speculative == "none":
        for name in given_of_drafting(args):
            yield f"--{name} has no effect with --speculative none", "remove one of the two"


def tokens_to_draft_are_given_once(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    if args.draft_schedule is not None:
        for name in engine_options.given_of_speculation(args):
            yield f"--draft_schedule and --{name} both set the number of draft tokens", "remove one of the two"


def adapters_have_an_engine(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    info = ENGINES[args.infer_backend]
    if args.adapters is not None and not info.serves_adapters:
        able = choices([f"--infer_backend {other.name}" for other in ENGINES.values() if other.serves_adapters])
        yield (
            f"--adapters is not supported with {info.label}: its answers were not verified against the merged model",
            f"use {able}, or merge them: swiftlite export --to_hf",
        )


def adapters_have_their_own_name(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    name = served_name(args.model or "", args.served_model_name)
    if args.adapters is not None and Path(args.adapters).resolve().name == name:
        yield (
            f"--adapters {args.adapters}: requests could not select it, because the model has the name {name} too",
            f"add --served_model_name {name}-base",
        )


def live_weights_have_an_engine(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    info = ENGINES[args.infer_backend]
    if args.live_weights and not info.takes_live_weights:
        able = choices([f"--infer_backend {other.name}" for other in ENGINES.values() if other.takes_live_weights])
        yield f"--live_weights is not supported with {info.label}", f"use {able}"


def weight_transport_has_live_weights(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    if args.weight_transport != "file" and not args.live_weights:
        yield (
            f"--weight_transport {args.weight_transport} requires --live_weights",
            "add --live_weights, or remove --weight_transport",
        )


def one_gpu_has_one_worker(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    number = ENGINES[args.infer_backend].engine_kwargs(args).get("tensor_parallel_size", 1)
    if args.weight_transport == "ipc" and number != 1:
        yield (
            f"--weight_transport ipc does not support tensor_parallel_size {number}: it uses the memory of one GPU",
            "use --weight_transport nccl",
        )


def live_weights_reach_whole_layers(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    """Require a layout in which every worker of the engine reads every tensor; see `unsupported_layout`."""
    kwargs = ENGINES[args.infer_backend].engine_kwargs(args)
    for name, usual in (("pipeline_parallel_size", 1), ("enable_expert_parallel", False)):
        value = kwargs.get(name) or usual
        if args.live_weights and value != usual:
            yield (
                f"--live_weights does not support {name} {value}: each worker must hold all layers and experts",
                "use only tensor_parallel_size",
            )


def live_weights_are_guarded(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    """Require an API key on an address that other machines can reach, and reject several keys on any address.

    With several keys, the routes that replace weights would not be protected, see `engines/vllm/live/guard.py`.
    """
    if not args.live_weights:
        return
    option = ENGINES[args.infer_backend].kwargs_option
    kwargs = ENGINES[args.infer_backend].engine_kwargs(args)
    key = kwargs.get("api_key", os.environ.get("VLLM_API_KEY"))
    one_key = f"""--{option} '{{"api_key": "..."}}'"""
    for name in ("middleware", "weight_transfer_config"):
        if name in kwargs:
            yield f"--live_weights sets {name!r}, which --{option} contains", "remove one of the two"
    if isinstance(key, list):
        yield "--live_weights does not support several api_keys", f"give one: {one_key}"
    elif not key and args.host not in HERE:
        yield (
            f"--live_weights with --host {args.host} requires an api_key: any client could replace the weights",
            f"use --host 127.0.0.1, or add {one_key}",
        )


def requests_are_logged_as_rows(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    if args.log_requests is None:
        if common.changed(args, ("log_requests_max_size_mb",)):
            yield "--log_requests_max_size_mb requires --log_requests", "add --log_requests requests.jsonl"
        return
    if not ENGINES[args.infer_backend].logs_requests:
        able = choices([f"--infer_backend {other.name}" for other in ENGINES.values() if other.logs_requests])
        yield f"--log_requests is not supported with --infer_backend {args.infer_backend}", f"use {able}"
    if args.adapters is not None:
        yield (
            "--log_requests does not support --adapters: heads are trained for one model, and the server has two",
            "merge them first: swiftlite export --to_hf --merge_lora true",
        )
    if Path(args.log_requests).suffix != ".jsonl":
        yield f"--log_requests {args.log_requests} must end with .jsonl", "use --log_requests requests.jsonl"


RULES = (
    common.hf_model_is_a_directory,
    common.numbers_are_in_range,
    engine_is_installed,
    engine_options.options_have_their_engine,
    engine_options.engine_runs_the_family,
    speculation_has_heads,
    speculative_options_have_speculation,
    tokens_to_draft_are_given_once,
    engine_options.adapters_are_a_directory,
    adapters_have_an_engine,
    adapters_have_their_own_name,
    live_weights_have_an_engine,
    weight_transport_has_live_weights,
    one_gpu_has_one_worker,
    live_weights_reach_whole_layers,
    live_weights_are_guarded,
    requests_are_logged_as_rows,
    engine_options.options_of_engines_agree,
    engine_options.ngrams_have_their_engine,
    engine_options.drafter_has_its_engine,
    engine_options.engine_kwargs_leave_what_has_an_option,
)
NOTES = (engine_options.float32_can_be_faster,)
