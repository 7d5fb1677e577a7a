"""Rules of `deploy`."""

import os
from collections.abc import Iterator

from swiftlite.args.commands import DeployArgs
from swiftlite.args.config import Problem
from swiftlite.engines.index import ENGINES
from swiftlite.plan.facts import Facts
from swiftlite.plan.layout import choices
from swiftlite.rules import common, engine

OR_PRINT_IT = ", or add --dry_run"
HERE = ("127.0.0.1", "localhost", "::1")


def engine_is_installed(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    info = ENGINES[args.infer_backend]
    if info.command_needs_no_install and args.dry_run:
        return
    for problem, hint in engine.missing_engine(info):
        yield problem, hint + OR_PRINT_IT if info.command_needs_no_install else hint


def given_of_drafting(args: DeployArgs) -> list[str]:
    """Return the names of the given options that control drafting."""
    own = ["draft_schedule"] if args.draft_schedule is not None else []
    return [*own, *engine.given_of_speculation(args)]


def speculation_has_heads(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    if not facts.hf_config or facts.heads.layers:
        return
    why = common.no_heads(facts)
    hint = f"leave it out, or {common.TRAIN_HEADS}"
    if args.speculative == "mtp":
        yield f"--speculative mtp, but {why}", hint
    elif args.speculative is None:
        for name in given_of_drafting(args):
            yield f"--{name}, but {why}", hint


def speculative_options_have_speculation(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    if args.speculative == "none":
        for name in given_of_drafting(args):
            yield f"--{name} with --speculative none", "leave one of them out"


def tokens_to_draft_are_said_once(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    if args.draft_schedule is not None:
        for name in engine.given_of_speculation(args):
            yield f"--draft_schedule and --{name} both say how many tokens to draft", "leave one of them out"


def adapters_have_an_engine(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    info = ENGINES[args.infer_backend]
    if args.adapters is not None and not info.serves_adapters:
        able = choices([f"--infer_backend {other.name}" for other in ENGINES.values() if other.serves_adapters])
        yield (
            f"--adapters with {info.label}, which was not found to answer with them as the merged model does",
            f"{able}; or export --to_hf, which adds them to the weights",
        )


def live_weights_have_an_engine(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    info = ENGINES[args.infer_backend]
    if args.live_weights and not info.takes_live_weights:
        able = choices([f"--infer_backend {other.name}" for other in ENGINES.values() if other.takes_live_weights])
        yield f"--live_weights with {info.label}, whose server is given none", able


def weight_transport_has_live_weights(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    if args.weight_transport != "file" and not args.live_weights:
        yield (
            f"--weight_transport {args.weight_transport}, but no --live_weights",
            "add --live_weights, or leave this out",
        )


def one_gpu_has_one_worker(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    number = ENGINES[args.infer_backend].engine_kwargs(args).get("tensor_parallel_size", 1)
    if args.weight_transport == "ipc" and number != 1:
        yield (
            f"--weight_transport ipc with tensor_parallel_size {number}: weights come through the memory of one GPU",
            "use --weight_transport nccl",
        )


def live_weights_reach_whole_layers(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    """Require workers that read every tensor, see `engines.loading.weight_update.unsupported_layout`."""
    kwargs = ENGINES[args.infer_backend].engine_kwargs(args)
    for name, usual in (("pipeline_parallel_size", 1), ("enable_expert_parallel", False)):
        value = kwargs.get(name) or usual
        if args.live_weights and value != usual:
            yield (
                f"--live_weights with {name} {value}: workers that hold some layers or experts are given none",
                "use tensor_parallel_size alone",
            )


def live_weights_are_guarded(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    """Require a key on a non-loopback address, and reject several keys on any address.

    With several keys the routes that replace weights would not be guarded, see `engines/vllm/live/guard.py`.
    """
    if not args.live_weights:
        return
    option = ENGINES[args.infer_backend].kwargs_option
    kwargs = ENGINES[args.infer_backend].engine_kwargs(args)
    key = kwargs.get("api_key", os.environ.get("VLLM_API_KEY"))
    one_key = f"""--{option} '{{"api_key": "..."}}'"""
    for name in ("middleware", "weight_transfer_config"):
        if name in kwargs:
            yield f"--live_weights and --{option} with {name!r}, which it sets", "leave one of them out"
    if isinstance(key, list):
        yield "--live_weights with several api_keys", f"give one: {one_key}"
    elif not key and args.host not in HERE:
        yield (
            f"--live_weights with --host {args.host} and no key: whoever reaches the port could replace the weights",
            f"leave --host at 127.0.0.1, or add {one_key}",
        )


RULES = (
    common.hf_model_is_a_directory,
    common.numbers_are_in_range,
    engine_is_installed,
    engine.options_have_their_engine,
    speculation_has_heads,
    speculative_options_have_speculation,
    tokens_to_draft_are_said_once,
    engine.adapters_are_a_directory,
    adapters_have_an_engine,
    live_weights_have_an_engine,
    weight_transport_has_live_weights,
    one_gpu_has_one_worker,
    live_weights_reach_whole_layers,
    live_weights_are_guarded,
    engine.options_of_engines_agree,
    engine.engine_kwargs_leave_what_has_an_option,
)
NOTES = ()
