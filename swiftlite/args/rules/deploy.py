"""Rules of `deploy`."""

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import DeployArgs
from swiftlite.args.fields import SglangArgs
from swiftlite.args.rules.common import (
    as_typed,
    hf_model_is_a_directory,
    numbers_are_in_range,
    speculative_tokens_are_given_once,
)
from swiftlite.args.rules.ground import INSTALL_SGLANG, INSTALL_VLLM, MTP_DEPTH_KEY, Ground, Problem

OF_BACKEND = {
    "vllm": ("vllm_engine_kwargs", "vllm_speculative_config"),
    "sglang": tuple(field.name for field in dataclasses.fields(SglangArgs)),
}
NUMBERS = ("sglang_speculative_num_steps", "sglang_speculative_eagle_topk", "sglang_speculative_num_draft_tokens")
OF_SPECULATION = (
    "num_speculative_tokens",
    "vllm_speculative_config",
    "sglang_speculative_algorithm",
    *NUMBERS,
)


def given(args: DeployArgs, names: tuple[str, ...]) -> dict[str, object]:
    """Those of these options that were given."""
    return {name: vars(args)[name] for name in names if vars(args)[name] is not None}


def engine_is_installed(args: DeployArgs, ground: Ground) -> Iterator[Problem]:
    # A command for SGLang can be printed anywhere; vLLM itself is asked how it would draft here.
    needed = args.infer_backend == "vllm" or not args.dry_run
    if needed and importlib.util.find_spec(args.infer_backend) is None:
        install = INSTALL_VLLM if args.infer_backend == "vllm" else f"{INSTALL_SGLANG}, or add --dry_run"
        yield f"--infer_backend {args.infer_backend}, but it is not installed", install


def options_have_their_engine(args: DeployArgs, ground: Ground) -> Iterator[Problem]:
    for backend, names in OF_BACKEND.items():
        if backend != args.infer_backend:
            for name in given(args, names):
                yield f"--{name} with --infer_backend {args.infer_backend}", f"add --infer_backend {backend}"


def speculation_has_heads(args: DeployArgs, ground: Ground) -> Iterator[Problem]:
    config = Path(args.model) / "config.json"
    if not ground.hf_config or ground.mtp_depth:
        return
    train = "train heads first: swiftlite megatron sft --mtp_num_layers 1"
    if args.speculative == "mtp":
        yield f"--speculative mtp, but {config} promises no MTP layer ({MTP_DEPTH_KEY})", f"leave it out, or {train}"
    elif args.speculative is None:
        for name in given(args, OF_SPECULATION):
            yield f"--{name}, but {config} promises no MTP layer ({MTP_DEPTH_KEY})", f"leave it out, or {train}"


def speculative_options_have_speculation(args: DeployArgs, ground: Ground) -> Iterator[Problem]:
    if args.speculative == "none":
        for name in given(args, OF_SPECULATION):
            yield f"--{name} with --speculative none", "leave one of them out"


def sglang_numbers_go_together(args: DeployArgs, ground: Ground) -> Iterator[Problem]:
    numbers = given(args, NUMBERS)
    missing = [f"--{name}" for name in NUMBERS if name not in numbers]
    if numbers and missing:
        words = " ".join(f"--{name} {value}" for name, value in numbers.items())
        yield f"{words} without {' and '.join(missing)}: SGLang wants all three or none", "give all three, or none"
    if numbers and args.num_speculative_tokens is not None:
        words = f"--num_speculative_tokens {args.num_speculative_tokens} and --{next(iter(numbers))}"
        yield f"{words} both say how many tokens to draft", "leave the first out"


def sglang_numbers_agree(args: DeployArgs, ground: Ground) -> Iterator[Problem]:
    steps, topk, tokens = (vars(args)[name] for name in NUMBERS)
    if None in (steps, topk, tokens):
        return
    if topk == 1 and tokens != steps + 1:
        yield (
            f"--sglang_speculative_num_draft_tokens {tokens} with {steps} steps of topk 1: SGLang would take "
            f"{steps + 1}, a chain of drafts and the newest token",
            f"--sglang_speculative_num_draft_tokens {steps + 1}",
        )
    if topk > 1 and tokens > 1 + topk + (steps - 1) * topk**2:
        yield (
            f"--sglang_speculative_num_draft_tokens {tokens}: {steps} steps of topk {topk} draft "
            f"{topk + (steps - 1) * topk**2} tokens, one more is verified",
            f"at most {1 + topk + (steps - 1) * topk**2}",
        )


def engine_kwargs_leave_what_has_an_option(args: DeployArgs, ground: Ground) -> Iterator[Problem]:
    """Given twice, they would be checked once."""
    for name in OF_BACKEND[args.infer_backend]:
        own = name.removeprefix(f"{args.infer_backend}_")
        kwargs = vars(args)[f"{args.infer_backend}_engine_kwargs"] or {}
        if own in kwargs:
            value = kwargs[own]
            text = f"'{json.dumps(value)}'" if isinstance(value, dict) else as_typed(value)
            yield f"--{args.infer_backend}_engine_kwargs has {own!r}, which is checked nowhere", f"--{name} {text}"


RULES = (
    hf_model_is_a_directory,
    numbers_are_in_range,
    engine_is_installed,
    options_have_their_engine,
    speculation_has_heads,
    speculative_options_have_speculation,
    speculative_tokens_are_given_once,
    sglang_numbers_go_together,
    sglang_numbers_agree,
    engine_kwargs_leave_what_has_an_option,
)
