"""Rules of `export`."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from swiftlite.args.commands import ExportArgs
from swiftlite.args.config import Problem
from swiftlite.engines.llamacpp.info import LLAMACPP
from swiftlite.families.index import get as get_family
from swiftlite.families.reward_model import is_reward_model
from swiftlite.families.serving.llamacpp import why_no_drafter
from swiftlite.gguf.types import QUANTIZER, WRITTEN_TYPES, quantizer
from swiftlite.hub.name import model_name
from swiftlite.hub.push import has_token, is_offline
from swiftlite.plan.facts import Facts, is_run, method_of_run, model_of_run, near_path, reads_run, run_checkpoints
from swiftlite.plan.quantization import CALIBRATED_METHODS, quant_bits_of
from swiftlite.rules import common, engine_options
from swiftlite.runtime import llm_compressor

LIMITS_OF_HEADS = ("min_acceptance", "max_regression")
LIMITS = (*LIMITS_OF_HEADS, "max_trunk_loss", "max_trunk_loss_increase")
COMPARED_LIMITS = ("max_regression", "max_trunk_loss_increase")
"""Limits that require a baseline."""


def export_has_one_direction(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    given = [f"--{name}" for name in ("to_hf", "to_mcore", "to_gguf") if vars(args)[name]]
    if len(given) > 1:
        yield f"{' and '.join(given)} cannot be combined", "use one of them"
    elif not (given or args.quant_method):
        yield (
            "one of --to_hf, --to_mcore, --to_gguf and --quant_method is required",
            "--to_hf writes a Hugging Face model, --to_mcore a checkpoint, --to_gguf a file for llama.cpp, "
            "--quant_method a quantized model",
        )


def export_source_fits(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if not reads_run(args):
        yield from common.hf_model_is_a_directory(args, facts)
        return
    if not args.model:
        yield "--model is required", "give the --output_dir of a run, or one of its checkpoint-N"
        return
    path = Path(args.model)
    if not path.exists():
        yield f"--model {path} does not exist", near_path(path) or "give the --output_dir of a training run"
    elif path.is_file():
        yield f"--model {path} is a file", f"give its directory: --model {path.parent}"
    elif not (args.to_hf or args.to_gguf) or (path.name.startswith("checkpoint-") and is_run(path.parent)):
        return
    elif not is_run(path):
        hint = "give the --output_dir of a training run"
        if facts.hf_config:
            hint = "it is already a Hugging Face model; --to_mcore converts it to a checkpoint"
        yield f"--model {path} is not a training run: it has no source/config.json", hint
    elif not run_checkpoints(path):
        yield f"--model {path} is a run without a checkpoint-N", "train until its first checkpoint (--save_steps)"


def export_output_can_take_its_name(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    """Require an --output_dir that a rename can replace.

    Exports are written to a directory next to it, which is then renamed.
    """
    given = Path(args.output_dir)
    directory = given.resolve()
    if not args.output_dir or not directory.is_dir():
        return
    inside = f"use a directory in it: --output_dir {given / 'export'}"
    if any(directory.iterdir()):
        yield f"--output_dir {given} is not empty", "use a new directory, or delete this one"
    elif directory.is_mount():
        yield f"--output_dir {given} is a mount point, which cannot be replaced", inside
    elif directory == Path.cwd():
        yield f"--output_dir {given} is the working directory, which would be replaced", inside
    elif not os.access(directory.parent, os.W_OK):
        yield f"--output_dir {given} is first written to {directory.parent}, which is not writable", inside


def export_output_is_outside_of_checkpoints(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    """Reject an --output_dir inside a run's checkpoints or `source/`.

    A run deletes its old checkpoints with all files in them, and only the run itself writes to `source/`.
    """
    given = Path(args.output_dir)
    for directory in (given.resolve(), *given.resolve().parents):
        is_inside = directory.name == "source" or directory.name.startswith("checkpoint-")
        if args.output_dir and is_inside and is_run(directory.parent):
            run = directory.parent
            problem = f"--output_dir {given} is in {directory}, which belongs to the run"
            yield problem, f"use --output_dir {run / 'export'}"


def acceptance_can_be_measured(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    limits = _given(args, LIMITS)
    if not (limits or (args.quant_method and args.val_dataset)):
        return
    flags = limits or "--val_dataset"
    if args.to_mcore:
        yield f"{flags} requires --to_hf", f"remove {flags}"
    elif args.mtp == "strip" and (of_heads := _given(args, LIMITS_OF_HEADS)):
        yield f"{of_heads} requires heads, which --mtp strip removes", f"remove {of_heads}"
    if not args.val_dataset:
        yield f"{flags} requires --val_dataset", "add --val_dataset FILE"
    yield from common.val_dataset_files_exist(args, facts)
    if facts.world_size > 1:
        yield f"{flags} does not support {facts.world_size} processes", "use one process"
    yield from common.baseline_is_a_model(args, facts)
    has_baseline = args.baseline or args.quant_method or not reads_run(args)
    compared = _given(args, COMPARED_LIMITS)
    if compared and not has_baseline and not model_of_run(Path(args.model)):
        yield (
            f"{compared} requires the model that the run started from, which no longer exists",
            "add --baseline DIR",
        )


def engine_has_models_to_compare(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.infer_backend == "none":
        return
    flag = f"--infer_backend {args.infer_backend}"
    if not args.quant_method:
        yield f"{flag} requires --quant_method", "remove it; to measure an export, use swiftlite evaluate"
    elif not args.val_dataset:
        yield f"{flag} requires --val_dataset", "add --val_dataset FILE"
    elif args.mtp == "strip":
        yield f"{flag} requires heads, which --mtp strip removes", f"remove {flag}"
    elif facts.hf_config and not (facts.heads.layers or args.mtp_graft_from):
        yield f"{flag} requires a model with heads", common.TRAIN_HEADS


def drafter_stays_plain(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    """Reject conversions of a drafter other than MTP heads that are not supported."""
    if not facts.heads.features or args.mtp == "strip":
        return
    hint = "remove it, or add --mtp strip" if reads_run(args) else "remove it"
    if args.to_gguf and (reason := why_no_drafter(get_family(facts.hf_config), facts.hf_config)):
        yield f"--to_gguf: {reason}", hint
    given = {f"--quant_method {args.quant_method}": args.quant_method, "--mtp_graft_from": args.mtp_graft_from}
    for flag in [flag for flag, value in given.items() if value]:
        yield f"{flag} does not support the drafter {facts.heads.kind!r}", hint


def reward_model_stays_plain(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    """Reject conversions and measurements of a reward model, which are those of language models."""
    if not is_reward_model(facts.hf_config):
        return
    for name in common.changed(args, ("to_gguf", "quant_method", "mtp_graft_from", "draft_vocab", *LIMITS)):
        yield f"--{name} does not support a reward model", f"remove --{name}"


def _given(args: ExportArgs, names: Iterable[str]) -> str:
    """Return the given options among `names` as text; empty if there are none."""
    return " and ".join(f"--{name}" for name in names if vars(args)[name] is not None)


def push_can_be_tried(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.push_to_hub is None:
        return
    flag = f"--push_to_hub {args.push_to_hub}"
    is_bare = "@" not in args.push_to_hub and model_name(f"{args.push_to_hub}@main") is not None
    if not is_bare:
        yield f"{flag} is not the name of a repository", "use --push_to_hub ORG/NAME"
    elif not (args.to_hf or (args.to_gguf and reads_run(args))):
        yield f"{flag} requires --to_hf, or --to_gguf of a run", "add --to_hf"
    elif not has_token():
        yield f"{flag} requires a token with write access", "hf auth login, or set HF_TOKEN"
    elif is_offline():
        yield f"{flag} requires access to the hub, which HF_HUB_OFFLINE disables", "unset HF_HUB_OFFLINE"


def draft_vocab_can_be_chosen(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.draft_vocab is None:
        return
    flag = f"--draft_vocab {args.draft_vocab}"
    size = facts.hf_config.get("vocab_size")
    method = method_of_run(Path(args.model))
    if not args.to_hf:
        yield f"{flag} requires --to_hf", "remove it; to train with it: swiftlite megatron sft --draft_vocab"
    elif method and not method.imitates_rows:
        yield (
            f"{flag} counts tokens in answers of the training rows, which {method.words} does not support",
            "export without it, then train its heads: swiftlite megatron sft --mtp_mode heads_only "
            f"{flag} --dataset FILE",
        )
    elif args.mtp == "strip" or args.mtp_graft_from:
        other = "--mtp_graft_from"
        if args.mtp == "strip":
            other = "--mtp strip"
        yield f"{flag} cannot be combined with {other}", "remove one of the two"
    elif not facts.heads.layers:
        yield f"{flag}: the run has no heads", common.TRAIN_HEADS
    elif facts.architecture is not None and facts.architecture.outside.heads_have_output_layers:
        yield f"{flag} is not supported: each head of this model has an output layer of its own", "remove it"
    elif facts.heads.draft_vocab:
        draft_vocab_size = len(facts.heads.draft_vocab)
        yield f"{flag}: the run's heads already have a draft vocabulary of {draft_vocab_size} tokens", "remove it"
    elif size and args.draft_vocab >= size:
        yield f"{flag} must be below the model's vocab_size {size}", "use a smaller number, or remove it"


def export_settings_without_effect(args: ExportArgs, facts: Facts) -> Iterator[str]:
    has_no_limit = not _given(args, LIMITS)
    has_rows = (args.quant_method or args.to_gguf) and args.val_dataset
    no_limit = (has_no_limit, f"none of {', '.join(f'--{name}' for name in LIMITS)} is given")
    unmeasured = (has_no_limit and not has_rows, no_limit[1])
    not_compared = (not _given(args, COMPARED_LIMITS) and not has_rows, "nothing is compared with it")
    not_pushed = (args.push_to_hub is None, "--push_to_hub is not given")
    names = ("val_dataset", "media_root", "max_pixels", "min_pixels")
    idle: dict[str, tuple[bool, str]] = dict.fromkeys(names, unmeasured)
    idle |= {"force": no_limit, "baseline": not_compared, "hub_private_repo": not_pushed}
    yield from common.without_effect(args, idle)


def adapter_export_is_alone(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.merge_lora:
        return
    if args.to_mcore:
        yield "--merge_lora false requires --to_hf", "remove it, or use --to_hf"
    names = ("mtp_graft_from", "torch_dtype", "draft_vocab", *LIMITS, "push_to_hub", "max_shard_size_gb")
    for name in common.changed(args, names):
        yield f"--{name} does not apply to --merge_lora false, which writes only adapters", "remove one of the two"


def quantization_fits(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    method = args.quant_method
    if method is None:
        names = ("quant_bits", "group_size", "quant_block", "quant_heads", *_CALIBRATION)
        for name in common.changed(args, names):
            yield f"--{name} requires --quant_method", f"add --quant_method, or remove --{name}"
        return
    flag = f"--quant_method {method}"
    if args.to_mcore:
        yield f"{flag} cannot be combined with --to_mcore", "remove one of the two"
    if not args.merge_lora:
        yield f"{flag} does not apply to --merge_lora false, which writes only adapters", "remove one of the two"
    bits = quant_bits_of(args)
    if bits not in (4, 8):
        yield f"--quant_bits {bits} is not supported", "use 8 or 4"
    elif method == "fp8" and bits != 8:
        yield f"--quant_bits {bits} does not apply to {flag}", "remove it, or use --quant_method rtn"
    elif method in ("awq", "nvfp4") and bits != 4:
        yield f"--quant_bits {bits} does not apply to {flag}", "remove it, or use --quant_method rtn or gptq"
    if args.group_size is not None and method == "nvfp4":
        yield f"--group_size {args.group_size} does not apply to {flag}, whose groups have 16 columns", "remove it"
    elif args.group_size is not None and bits != 4:
        yield f"--group_size requires --quant_bits 4, not {bits}", "remove it"
    if args.quant_block and method != "fp8":
        yield f"--quant_block requires --quant_method fp8, not {method}", "remove it"
    if method not in CALIBRATED_METHODS:
        for name in common.changed(args, _CALIBRATION):
            yield f"--{name} requires --quant_method gptq or awq, not {method}", f"remove --{name}"
    if not reads_run(args):
        if facts.is_quantized:
            yield f"--model {args.model} is already quantized", "use the model before its quantization"
        for name in common.changed(
            args, ("mtp", "mtp_graft_from", "draft_vocab", "torch_dtype", "dequantize", "push_to_hub")
        ):
            yield f"--{name} requires --to_hf", f"remove --{name}, or export a run with --to_hf"


def calibration_is_possible(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.quant_method not in CALIBRATED_METHODS:
        return
    flag = f"--quant_method {args.quant_method}"
    if not llm_compressor.LLM_COMPRESSOR.is_installed:
        yield f"{flag} requires llm-compressor in a separate environment", llm_compressor.install_command()
    if not args.dataset:
        yield f"{flag} requires --dataset", "give calibration rows, such as the training data: --dataset train.jsonl"
    for name in args.dataset:
        yield from common.file_problems("--dataset", name)
    if facts.world_size > 1:
        yield f"{flag} does not support {facts.world_size} processes", "use one process"


_CALIBRATION = ("dataset", "quant_n_samples", "max_length", "quant_batch_size")


def gguf_fits(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if not args.to_gguf:
        for name in common.changed(args, ("gguf_type",)):
            yield f"--{name} requires --to_gguf", f"add --to_gguf, or remove --{name}"
        return
    if args.quant_method:
        yield (
            f"--quant_method {args.quant_method} cannot be combined with --to_gguf",
            "use --gguf_type, such as q8_0",
        )
    if not args.merge_lora:
        yield "--merge_lora false does not apply to --to_gguf", "remove one of the two"
    for name in (*COMPARED_LIMITS, "max_trunk_loss"):
        if vars(args)[name] is not None:
            yield f"--{name} does not apply to --to_gguf", f"remove --{name}"
    if not reads_run(args):
        for name in common.changed(args, ("mtp", "mtp_graft_from", "draft_vocab", "torch_dtype", "dequantize")):
            yield f"--{name} applies only to runs, not to a Hugging Face model", f"remove --{name}"
    if args.min_acceptance is not None:
        if not LLAMACPP.is_installed:
            problem = f"--min_acceptance requires {LLAMACPP.label} with --to_gguf, which counts accepted drafts"
            yield problem, LLAMACPP.install
        if facts.hf_config and not facts.heads.layers:
            yield f"--min_acceptance {args.min_acceptance} requires heads; {common.no_heads(facts)}", "remove it"
    if args.gguf_type and args.gguf_type not in WRITTEN_TYPES and quantizer() is None:
        yield (
            f"--gguf_type {args.gguf_type} requires llama-quantize, a program of llama.cpp",
            f"put it on PATH or set {QUANTIZER}=FILE; without it: {', '.join(WRITTEN_TYPES)}",
        )


def graft_is_not_stripped(args: ExportArgs, facts: Facts) -> Iterator[Problem]:
    if args.mtp_graft_from is not None and args.mtp == "strip":
        yield "--mtp_graft_from cannot be combined with --mtp strip", "remove one of the two"


RULES = (
    export_has_one_direction,
    export_source_fits,
    common.output_dir_is_given,
    export_output_can_take_its_name,
    export_output_is_outside_of_checkpoints,
    common.numbers_are_in_range,
    common.layout_fits,
    acceptance_can_be_measured,
    drafter_stays_plain,
    reward_model_stays_plain,
    engine_has_models_to_compare,
    engine_options.engine_is_installed,
    common.graft_has_heads,
    graft_is_not_stripped,
    adapter_export_is_alone,
    quantization_fits,
    calibration_is_possible,
    gguf_fits,
    draft_vocab_can_be_chosen,
    push_can_be_tried,
    common.images_have_a_place_and_a_size,
)
NOTES = (export_settings_without_effect,)
