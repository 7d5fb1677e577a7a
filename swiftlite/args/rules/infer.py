"""Rules of `infer`."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import InferArgs
from swiftlite.args.rules.common import (
    hf_model_is_a_directory,
    numbers_are_in_range,
    speculative_tokens_are_given_once,
    val_dataset_files_exist,
    without_effect,
)
from swiftlite.args.rules.ground import INSTALL_VLLM, MTP_DEPTH_KEY, Ground, Problem


def speculation_has_heads(args: InferArgs, ground: Ground) -> Iterator[Problem]:
    config = Path(args.model) / "config.json"
    if args.speculative == "mtp" and config.is_file() and ground.hf_config and not ground.mtp_depth:
        yield (
            f"--speculative mtp, but {config} promises no MTP layer ({MTP_DEPTH_KEY})",
            "leave it out, or train heads first: swiftlite megatron sft --mtp_num_layers 1",
        )


def speculative_options_have_speculation(args: InferArgs, ground: Ground) -> Iterator[Problem]:
    if args.speculative == "mtp":
        return
    if args.num_speculative_tokens is not None:
        yield f"--num_speculative_tokens {args.num_speculative_tokens} without speculation", "add --speculative mtp"
    if args.vllm_speculative_config is not None:
        yield "--vllm_speculative_config without speculation", "add --speculative mtp"
    if args.compare:
        yield "--compare has nothing to compare without speculation", "add --speculative mtp"
    if args.acceptance_json is not None:
        yield "--acceptance_json has no acceptance to add without speculation", "add --speculative mtp"


def vllm_options_have_vllm(args: InferArgs, ground: Ground) -> Iterator[Problem]:
    if args.infer_backend == "vllm":
        if importlib.util.find_spec("vllm") is None:
            yield "--infer_backend vllm, but vLLM is not installed", INSTALL_VLLM
        return
    for name in ("vllm_engine_kwargs", "vllm_speculative_config"):
        if vars(args)[name] is not None:
            yield f"--{name} with --infer_backend {args.infer_backend}", "add --infer_backend vllm"


def acceptance_json_fits(args: InferArgs, ground: Ground) -> Iterator[Problem]:
    if args.acceptance_json is None:
        return
    if not Path(args.acceptance_json).is_file():
        yield f"--acceptance_json {args.acceptance_json} does not exist", "give the acceptance.json of an sft run"
    if not args.val_dataset:
        yield "--acceptance_json needs prompts to measure on", "add --val_dataset FILE"


def comparison_has_prompts(args: InferArgs, ground: Ground) -> Iterator[Problem]:
    if args.compare and not args.val_dataset:
        yield "--compare runs the same prompts twice, and a chat on stdin has none to repeat", "add --val_dataset FILE"


def infer_settings_without_effect(args: InferArgs, ground: Ground) -> Iterator[str]:
    idle = {
        "max_batch_size": (args.infer_backend != "vllm", f"{args.infer_backend} answers one prompt at a time"),
        "top_p": (args.temperature == 0, "--temperature 0 is greedy"),
    }
    yield from without_effect(args, idle)


RULES = (
    hf_model_is_a_directory,
    val_dataset_files_exist,
    numbers_are_in_range,
    speculation_has_heads,
    speculative_options_have_speculation,
    speculative_tokens_are_given_once,
    vllm_options_have_vllm,
    acceptance_json_fits,
    comparison_has_prompts,
)
NOTES = (infer_settings_without_effect,)
