"""Rules of `doctor --plan`: the rules of the planned command, except those about files and software, and rules for the
options of doctor.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace

from swiftlite.args.command_line import shell_line
from swiftlite.args.commands import PlannedRun, SftArgs
from swiftlite.args.config import Problem
from swiftlite.args.docs import options
from swiftlite.args.fields import DistributedArgs, KernelArgs, MtpArgs, RecomputeArgs
from swiftlite.families.index import image_sizes
from swiftlite.methods.index import method_of
from swiftlite.plan.cost.gpus import GPUS
from swiftlite.plan.cost.setup import images_of
from swiftlite.plan.facts import Facts
from swiftlite.plan.heads import with_source_of_heads
from swiftlite.plan.layout import group_of, layout_of, process_problems
from swiftlite.plan.low_precision import low_precision_of
from swiftlite.rules import common
from swiftlite.rules.training import gkd, grpo, sft, sft_data, sft_report, sft_resume

_OF_FILES_AND_SOFTWARE = (
    common.hf_model_is_a_directory,
    common.val_dataset_files_exist,
    common.output_dir_is_given,
    common.optimizer_is_installed,
    sft_data.dataset_files_exist,
    sft_report.report_to_can_be,
    grpo.rewards_are_given,
    grpo.engine_can_generate,
    gkd.completions_can_be_drawn,
)
_OF_BATCHES = (sft.global_batch_divides, sft.virtual_stages_have_micro_batches)
"""Rules of the number of micro-batches in a step, on which memory does not depend."""
_OF_ALL_SIZES = {"fused_kernels", "max_length", "micro_batch_size", "torch_dtype"}.union(
    options(RecomputeArgs), options(DistributedArgs)
)
"""Options of a plan without --model, which compares full training, adapters and heads on one GPU."""


def own_numbers_are_in_range(args: PlannedRun, facts: Facts) -> Iterator[Problem]:
    yield from common.numbers_are_in_range(args.own, facts)


def model_is_described(args: PlannedRun, facts: Facts) -> Iterator[Problem]:
    if args.run.model:
        yield from common.hf_model_is_described(args.run, facts)


def other_options_have_a_model(args: PlannedRun, facts: Facts) -> Iterator[Problem]:
    if args.run.model:
        return
    for part in (args.own, args.run):
        for name in common.changed(part, set(options(type(part))) - {"plan", *_OF_ALL_SIZES}):
            problem = f"--{name} {shell_line(getattr(part, name))} with --plan requires --model"
            yield problem, "add --model DIRECTORY, or remove it to plan all sizes of Qwen3"


def gpus_hold_the_layout(args: PlannedRun, facts: Facts) -> Iterator[Problem]:
    if not args.own.num_gpus:
        return
    for problem, _ in process_problems(layout_of(args.run), facts.world_size):
        yield f"--num_gpus {args.own.num_gpus}: {problem}", "remove --num_gpus for the minimum of this layout"


def speed_can_be_estimated(args: PlannedRun, facts: Facts) -> Iterator[Problem]:
    own, run = args.own, args.run
    if own.gpu_type is None:
        return
    given = f"--gpu_type {own.gpu_type}"
    if own.num_gpus is None:
        yield f"{given} requires --num_gpus", "add --num_gpus 8"
    unsupported = {
        f"the options of {method_of(run).words}": type(run) is not SftArgs,
        f"--images_per_row {own.images_per_row}": own.images_per_row > 0,
        "--torch_dtype float32": run.torch_dtype == "float32",
        "--optimizer_cpu_offload true": run.optimizer_cpu_offload,
    }
    for other in (name for name, is_given in unsupported.items() if is_given):
        yield f"{given} does not support {other}: the speed of such a run is unknown", "remove one of the two"
    gpu, low = GPUS.get(own.gpu_type), low_precision_of(group_of(run, KernelArgs))
    if gpu is None:
        yield f"unknown GPU: {given}", f"use one of {', '.join(GPUS)}"
    elif low and gpu.capability < low.capability:
        problem = f"{low.flag} requires compute capability {low.capability}, but {given} has {gpu.capability}"
        yield problem, "remove it, or use another --gpu_type"


def images_can_be_planned(args: PlannedRun, facts: Facts) -> Iterator[Problem]:
    number, run = args.own.images_per_row, args.run
    if not number:
        return
    given, sizes, images = f"--images_per_row {number}", image_sizes(facts.hf_config), images_of(run, facts, number)
    if type(run) is not SftArgs:
        yield f"{given} does not support the options of {method_of(run).words}", "remove it"
    if sizes is None:
        yield f"{given} requires a model with a vision tower", "remove it"
    elif images is None:
        problem = f"{given} requires --max_pixels, because the model has no maximum in preprocessor_config.json"
        yield problem, "add --max_pixels 1003520"
    elif images.items_per_row > run.max_length:
        size = f"--max_pixels {run.max_pixels or facts.max_pixels}"
        problem = f"{given} with {size}: {images.items_per_row} tokens, over --max_length {run.max_length}"
        yield problem, f"use --max_length {images.items_per_row} or more, or a smaller --max_pixels"


def run_is_possible(args: PlannedRun, facts: Facts) -> Iterator[Problem]:
    if any(True for _ in gpus_hold_the_layout(args, facts)):
        return  # the rules of a run would report it again
    run = with_source_of_heads(args.run, facts.heads)
    for rule in method_of(run).load_rules().RULES:
        is_planned = inspect.getmodule(rule) is not sft_resume
        if is_planned and rule not in (*_OF_FILES_AND_SOFTWARE, *_OF_BATCHES):
            yield from rule(run, facts)


def run_settings_have_an_effect(args: PlannedRun, facts: Facts) -> Iterator[str]:
    run = with_source_of_heads(args.run, facts.heads)
    if run.mtp_mode == "heads_only":  # a plan of heads also estimates --stream_trunk
        run = replace(run, stream_trunk_gb=MtpArgs.stream_trunk_gb)
    for note in method_of(run).load_rules().NOTES:
        yield from note(run, facts)


RULES = (
    own_numbers_are_in_range,
    model_is_described,
    other_options_have_a_model,
    gpus_hold_the_layout,
    speed_can_be_estimated,
    images_can_be_planned,
    run_is_possible,
)
NOTES = (run_settings_have_an_effect,)
