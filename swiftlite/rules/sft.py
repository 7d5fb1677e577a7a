"""Rules of `megatron sft`."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swiftlite.args.bounds import out_of_bounds
from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import DistributedArgs, ParallelLayout, RecomputeArgs, RunArgs
from swiftlite.args.mock_config import FLAG, check_mock_config
from swiftlite.errors import UserError
from swiftlite.heads import Heads
from swiftlite.plan.facts import Facts, Problem, read_hf_config, run_checkpoints
from swiftlite.plan.layout import (
    choices,
    data_parallel_size,
    layout_of,
    layout_problems,
    num_virtual_stages,
    process_problems,
    sequence_multiple,
)
from swiftlite.plan.run import heads_of, holds_out, packing_of
from swiftlite.rules.common import (
    DATA_SUFFIXES,
    as_typed,
    file_problems,
    graft_has_heads,
    hf_model_is_a_directory,
    layout_fits,
    numbers_are_in_range,
    output_dir_is_given,
    recompute_options_fit,
    val_dataset_files_exist,
    without_effect,
)


def dataset_files_exist(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.sft_mock_dataset_config_json is not None:
        if args.dataset:
            yield "--dataset and --sft_mock_dataset_config_json: one run trains on one of them", "leave one out"
        return
    if not args.dataset:
        yield "--dataset is required", "give one or more files: --dataset train.jsonl"
    for name in args.dataset:
        yield from file_problems("--dataset", name, DATA_SUFFIXES)


def streamed_files_have_rows(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    for name in args.dataset if args.streaming else ():
        file, _, sample = name.partition("#")
        if sample:
            yield f"--dataset {name} with --streaming: a sample needs the whole file", f"give the file: {file}"
        elif Path(file).suffix.lower() not in (".jsonl", ".parquet"):
            yield f"--dataset {name} with --streaming: only .jsonl and .parquet are read row by row", "convert it"


def mock_dataset_is_described(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    mock = args.sft_mock_dataset_config_json
    if mock is None:
        return
    try:
        check_mock_config(mock)
    except UserError as error:
        yield error.problem, error.hint
        return
    if mock["mode"] == "file" and not Path(mock["path"]).is_file():
        yield f"{FLAG}: {mock['path']} is no file", "one length on each line, as 1024"
    longest = mock.get("max_seq_len", 0)
    if longest > args.max_length:
        yield (
            f"{FLAG}: samples of up to {longest} tokens, over --max_length {args.max_length}",
            f"--max_length {longest}",
        )


def packing_has_room(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if out_of_bounds(args) or not args.packing:
        return
    multiple = sequence_multiple(layout_of(args))
    longest = -(-args.max_length // multiple) * multiple
    length = args.packing_length or args.max_length
    if longest > length:
        shared = (
            f", which {args.context_parallel_size} context-parallel ranks share as {longest}" if multiple > 1 else ""
        )
        yield (
            f"a sample may have --max_length {args.max_length} tokens{shared}, a packed row --packing_length {length}",
            f"--packing_length {longest}, or --max_length {length // multiple * multiple}",
        )


def packing_options_go_together(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    balanced = args.sequence_packing_scheduler != "none"
    if balanced and not args.packing:
        yield f"--sequence_packing_scheduler {args.sequence_packing_scheduler} needs --packing", "add --packing"
    if not args.streaming:
        return
    if not args.packing:
        yield "--streaming needs --packing: a stream has no batches but of packed rows", "add --packing"
    if balanced:
        yield (
            f"--streaming with --sequence_packing_scheduler {args.sequence_packing_scheduler}: streamed rows are "
            "packed as they are read",
            "leave --sequence_packing_scheduler out",
        )
    if args.train_iters is None:
        yield "--streaming needs --train_iters: how many rows the files hold shows at their end", "add --train_iters N"
    if args.sft_mock_dataset_config_json is not None:
        yield "--streaming reads --dataset, not --sft_mock_dataset_config_json", "leave --streaming out"


def resume_packs_the_same_rows(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    for name, before, now in _changed_on_resume(args, facts):
        if name == "context_parallel_size" and args.packing and args.sequence_packing_scheduler == "none":
            yield (
                f"--resume with --context_parallel_size {now}, but this run began with {before}: each sample of a "
                "packed row is padded for it, so other rows would come",
                f"--context_parallel_size {before}",
            )


def global_batch_divides(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    micro, layout = args.micro_batch_size, layout_of(args)
    if packing_of(args) == "step":
        return  # it counts samples, and each rank gets as many as level the work
    if micro < 1 or args.global_batch_size < 1 or out_of_bounds(layout):
        return  # another rule says so
    if process_problems(layout, facts.world_size):
        return
    data_parallel = data_parallel_size(layout, facts.world_size)
    unit = micro * data_parallel
    if args.global_batch_size % unit:
        below = args.global_batch_size // unit * unit
        near_sizes = [str(size) for size in (below, below + unit, below + 2 * unit, below + 3 * unit) if size > 0][:3]
        yield (
            f"--global_batch_size {args.global_batch_size} does not divide into "
            f"micro_batch_size x data parallel = {micro} x {data_parallel}",
            f"use {choices(near_sizes)}",
        )


def mtp_weights_have_a_source(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    wanted, present = args.mtp_num_layers, facts.heads.layers
    if not facts.hf_config or not wanted or wanted < 0 or args.mtp_init != "checkpoint" or wanted == present:
        return
    if not present:
        yield (
            f"--mtp_num_layers {wanted}, but the checkpoint has no MTP weights",
            "add --mtp_init copy_last_layer to start from its last block, or --mtp_init random",
        )
    else:
        yield (
            f"--mtp_num_layers {wanted}, but the checkpoint has MTP depth {present}",
            f"leave --mtp_num_layers out to train its {present}, or make all {wanted} anew with "
            "--mtp_init copy_last_layer or random",
        )


def mtp_options_have_heads(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not facts.hf_config or heads_of(args, facts.heads).layers != 0:
        return
    why = "--mtp_num_layers is 0" if args.mtp_num_layers == 0 else "the checkpoint has none"
    if args.mtp_mode == "heads_only":
        yield f"--mtp_mode heads_only trains MTP heads alone, but {why}", _add_heads(args)
    elif args.mtp_init != "checkpoint" and args.mtp_num_layers is None:
        yield f"--mtp_init {args.mtp_init} has no head to fill: {why}, --mtp_num_layers is not set", _add_heads(args)


def graft_is_asked_for_once(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.mtp_init == "graft" and args.mtp_graft_from is None:
        yield "--mtp_init graft does not say whose heads to take", "add --mtp_graft_from DIR"
    elif args.mtp_init != "graft" and args.mtp_graft_from is not None:
        yield f"--mtp_graft_from without --mtp_init graft: heads come from {args.mtp_init}", "add --mtp_init graft"
    elif args.mtp_graft_from is not None and facts.hf_config:
        wanted, present = (
            heads_of(args, facts.heads).layers,
            Heads.from_config(read_hf_config(Path(args.mtp_graft_from))).layers,
        )
        if wanted and present and wanted != present:
            yield (
                f"--mtp_graft_from {args.mtp_graft_from} has MTP depth {present}, this run {wanted}",
                f"--mtp_num_layers {present}",
            )


def one_layer_is_unrolled(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    layers = heads_of(args, facts.heads).layers
    if facts.hf_config and args.mtp_unroll > 1 and layers > 1:
        yield (
            f"--mtp_unroll {args.mtp_unroll} applies one MTP layer again and again, but there are {layers}",
            "leave --mtp_unroll out, or start from one layer: --mtp_num_layers 1 --mtp_init copy_last_layer",
        )


def _add_heads(args: SftArgs) -> str:
    init = args.mtp_init if args.mtp_init != "checkpoint" else "copy_last_layer"
    return f"add --mtp_num_layers 1 --mtp_init {init}"


def virtual_stages_have_micro_batches(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    layout, pp = layout_of(args), args.pipeline_model_parallel_size
    if out_of_bounds(args) or layout_problems(layout, facts.architecture, facts.heads.layers):
        return  # other rules say so
    if num_virtual_stages(layout) is None or process_problems(layout, facts.world_size):
        return
    if packing_of(args) == "step":
        return  # the schedule rounds their number up
    unit = args.micro_batch_size * data_parallel_size(layout, facts.world_size)
    number = args.global_batch_size // unit
    if args.global_batch_size % unit == 0 and number % pp:
        yield (
            f"virtual pipeline stages need a multiple of {pp} micro-batches per step, but there are {number} = "
            f"--global_batch_size {args.global_batch_size} / {unit}",
            f"use --global_batch_size {-(-number // pp) * pp * unit}",
        )


def overlap_has_its_optimizer(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    needs = {
        "use_distributed_optimizer": args.use_distributed_optimizer,
        "overlap_grad_reduce": args.overlap_grad_reduce,
    }
    missing = [f"--{name} true" for name, is_given in needs.items() if not is_given]
    if args.overlap_param_gather and missing:
        yield f"--overlap_param_gather needs {' and '.join(missing)}", f"add {' '.join(missing)}"


def min_lr_is_below_lr(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.min_lr is not None and args.min_lr > args.lr:
        yield f"--min_lr {args.min_lr} is above --lr {args.lr}", "the learning rate decays from --lr to --min_lr"


def output_dir_fits_resume(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not args.output_dir:
        return
    directory = Path(args.output_dir)
    checkpoints = run_checkpoints(directory)
    if args.resume and not checkpoints:
        hint = "leave --resume out to start a new run"
        if (directory / "args.json").exists():
            hint = "that run ended before its first checkpoint: delete it, and start again without --resume"
        yield f"--resume, but --output_dir {directory} holds no checkpoint-N", hint
    if not args.resume and checkpoints:
        yield (
            f"--output_dir {directory} already holds a run (newest: {checkpoints[-1].name}); two would mix",
            "add --resume to go on from there, or name another directory",
        )
    elif not args.resume and (directory / "args.json").exists():
        yield (
            f"--output_dir {directory} already holds a run that wrote no checkpoint; two would mix",
            "delete it, or name another directory",
        )


# What a run may change when it goes on: how often it reports and saves, and how its work is cut up.
_FREE_ON_RESUME = {
    field.name
    for group in (RunArgs, ParallelLayout, DistributedArgs, RecomputeArgs)
    for field in dataclasses.fields(group)
} | {
    "dataset_num_proc",
    "micro_batch_size",
    "num_train_epochs",
    "train_iters",
    "trust_remote_code",
}


def resume_keeps_the_options(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    """With other data, another objective or other heads it would be another run under the first one's name."""
    for name, before, now in _changed_on_resume(args, facts):
        if name not in _FREE_ON_RESUME:
            yield (
                f"--resume with --{name} {as_typed(now)}, but this run began with {as_typed(before)}",
                f"leave it as it was (all of it: {Path(args.output_dir) / 'args.json'}), or start another --output_dir",
            )


def resume_knows_the_options(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    path = Path(args.output_dir) / "args.json"
    if args.resume and run_checkpoints(path.parent) and _saved_options(args) is None:
        yield (
            f"--resume: {path}, what this run began with, is {'damaged' if path.exists() else 'not there'}",
            "put it back; or start anew from an export of the newest checkpoint",
        )


def resume_has_steps_left(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    checkpoints = run_checkpoints(Path(args.output_dir)) if args.resume and args.output_dir else []
    if checkpoints and args.train_iters is not None:
        done = int(checkpoints[-1].name.rpartition("-")[2])
        if done > args.train_iters:
            yield f"--train_iters {args.train_iters}, but {checkpoints[-1]} is past it", f"--train_iters {done} or more"


def _saved_options(args: SftArgs) -> dict[str, Any] | None:
    """args.json of the run that goes on; None where there is none that can be read."""
    if not args.resume:
        return None
    try:
        saved = json.loads((Path(args.output_dir or ".") / "args.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return saved if isinstance(saved, dict) else None


def _changed_on_resume(args: SftArgs, facts: Facts) -> Iterator[tuple[str, Any, Any]]:
    """Options with another value than args.json of the run has: (name, before, now)."""
    saved = _saved_options(args)
    if saved is None:
        return
    for name, now in vars(args).items():
        before = saved.get(name, now)
        if name == "mtp_num_layers":  # unset is the checkpoint's depth: spelling it out changes nothing
            before, now = (facts.heads.layers if layers is None else layers for layers in (before, now))
        is_same_place = name == "model" and Path(str(before)).resolve() == Path(str(now)).resolve()
        if before != now and not is_same_place:
            yield name, before, now


# Notes: settings without effect


def sft_settings_without_effect(args: SftArgs, facts: Facts) -> Iterator[str]:
    """Every setting that another one makes idle, when it was changed from its default."""
    no_heads = heads_of(args, facts.heads).layers == 0
    holds_nothing_out, packing = not holds_out(args), packing_of(args)
    not_whole_read = args.streaming or args.sft_mock_dataset_config_json is not None
    not_whole = "--streaming" if args.streaming else FLAG
    why = "--split_dataset_ratio is 0" if args.split_dataset_ratio == 0 else f"{not_whole} without --val_dataset"
    nothing = f"nothing is held out: {why}"
    architecture = facts.architecture
    no_experts = (architecture is not None and not architecture.has_experts, "the model has no experts")
    idle = {
        "split_dataset_ratio": (
            bool(args.val_dataset) or not_whole_read,
            "--val_dataset is given" if args.val_dataset else f"{not_whole} is given",
        ),
        "num_train_epochs": (args.train_iters is not None, "--train_iters is given"),
        "min_lr": (args.lr_decay_style == "constant", "--lr_decay_style is constant"),
        "mtp_loss_scaling_factor": (no_heads, "the model has no MTP layers"),
        "mtp_loss": (no_heads, "the model has no MTP layers"),
        "mtp_unroll": (no_heads, "the model has no MTP layers"),
        "mtp_unroll_beta": (args.mtp_unroll == 1, "--mtp_unroll is 1"),
        "mtp_init": (args.mtp_num_layers == 0, "--mtp_num_layers is 0"),
        "eval_steps": (holds_nothing_out, nothing),
        "eval_iters": (holds_nothing_out, nothing),
        "acceptance_samples": (
            args.acceptance_samples > 0 and (no_heads or holds_nothing_out),
            "the model has no MTP layers" if no_heads else nothing,
        ),
        "micro_batch_size": (packing == "step", "micro-batches are as many as --packing_length needs"),
        "packing_length": (not args.packing, "--packing is not given"),
        "padding_free": (args.packing, "--packing leaves no padding"),
        "streaming_buffer_size": (not args.streaming, "--streaming is not given"),
        "dataset_shuffle": (args.streaming, "--streaming goes in the order of the files"),
        "dataset_num_proc": (args.streaming, "--streaming tokenizes while training goes on"),
        "recompute_method": (args.recompute_granularity != "full", "--recompute_granularity is not full"),
        "recompute_num_layers": (args.recompute_granularity != "full", "--recompute_granularity is not full"),
        "recompute_modules": (args.recompute_granularity != "selective", "--recompute_granularity is not selective"),
        "moe_aux_loss_coeff": no_experts,
        "moe_router_bias_update_rate": no_experts,
        "acceptance_max_new_tokens": (args.acceptance_samples == 0, "--acceptance_samples is 0"),
    }
    yield from without_effect(args, idle)
    for name, before, now in _changed_on_resume(args, facts):
        if name in ("train_iters", "num_train_epochs"):
            yield f"--{name} was {before} and is {now}: the learning rate follows the new schedule from here on"


def held_out_rows_are_trained_on(args: SftArgs, facts: Facts) -> Iterator[str]:
    trained = {Path(name.partition("#")[0]).resolve() for name in args.dataset}
    for name in args.val_dataset:
        if Path(name.partition("#")[0]).resolve() in trained:
            yield f"{name} is in --dataset and in --val_dataset: its evaluation measures memory"


def streams_hold_nothing_out(args: SftArgs, facts: Facts) -> Iterator[str]:
    if args.streaming and not args.val_dataset:
        yield "--streaming without --val_dataset: nothing is held out, so nothing is evaluated"


RULES = (
    hf_model_is_a_directory,
    dataset_files_exist,
    val_dataset_files_exist,
    output_dir_is_given,
    output_dir_fits_resume,
    resume_knows_the_options,
    resume_has_steps_left,
    resume_keeps_the_options,
    numbers_are_in_range,
    mock_dataset_is_described,
    streamed_files_have_rows,
    packing_options_go_together,
    packing_has_room,
    resume_packs_the_same_rows,
    min_lr_is_below_lr,
    layout_fits,
    global_batch_divides,
    virtual_stages_have_micro_batches,
    overlap_has_its_optimizer,
    recompute_options_fit,
    mtp_weights_have_a_source,
    mtp_options_have_heads,
    one_layer_is_unrolled,
    graft_has_heads,
    graft_is_asked_for_once,
)
NOTES = (sft_settings_without_effect, held_out_rows_are_trained_on, streams_hold_nothing_out)
