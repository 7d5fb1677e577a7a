"""Rules of `deploy`."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import DeployArgs
from swiftlite.heads import DEPTH_KEY
from swiftlite.plan.facts import INSTALL_SGLANG, INSTALL_VLLM, Facts, Problem
from swiftlite.rules.common import (
    hf_model_is_a_directory,
    numbers_are_in_range,
    speculative_tokens_are_given_once,
)
from swiftlite.rules.engine import (
    OF_SPECULATION,
    engine_kwargs_leave_what_has_an_option,
    given,
    options_have_their_engine,
    sglang_numbers_agree,
    sglang_numbers_go_together,
)

OR_PRINT_IT = ", or add --dry_run"


def engine_is_installed(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    # A command for SGLang can be printed anywhere; vLLM itself is asked how it would draft here.
    needed = args.infer_backend == "vllm" or not args.dry_run
    if needed and importlib.util.find_spec(args.infer_backend) is None:
        install = INSTALL_VLLM if args.infer_backend == "vllm" else INSTALL_SGLANG + OR_PRINT_IT
        yield f"--infer_backend {args.infer_backend}, but it is not installed", install


def speculation_has_heads(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    config = Path(args.model) / "config.json"
    if not facts.hf_config or facts.heads.layers:
        return
    train = "train heads first: swiftlite megatron sft --mtp_num_layers 1"
    if args.speculative == "mtp":
        yield f"--speculative mtp, but {config} promises no MTP layer ({DEPTH_KEY})", f"leave it out, or {train}"
    elif args.speculative is None:
        for name in given(args, OF_SPECULATION):
            yield f"--{name}, but {config} promises no MTP layer ({DEPTH_KEY})", f"leave it out, or {train}"


def speculative_options_have_speculation(args: DeployArgs, facts: Facts) -> Iterator[Problem]:
    if args.speculative == "none":
        for name in given(args, OF_SPECULATION):
            yield f"--{name} with --speculative none", "leave one of them out"


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
