"""Rules of `doctor`."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from swiftlite.args.command_line import shell_line
from swiftlite.args.commands import DoctorArgs
from swiftlite.args.config import Problem
from swiftlite.args.docs import options
from swiftlite.args.fields import RecomputeArgs
from swiftlite.base.errors import UserError
from swiftlite.bridge.hf_config import read_config
from swiftlite.engines.index import ENGINES, names_with
from swiftlite.engines.info import EngineInfo
from swiftlite.families.index import image_sizes
from swiftlite.methods.dpo import WITHOUT_REFERENCE
from swiftlite.plan.cost.gpus import GPUS
from swiftlite.plan.cost.setup import planned_kernels, planned_setup
from swiftlite.plan.facts import Facts, near_path
from swiftlite.plan.kernels import Machine, kernel_problems
from swiftlite.plan.layout import instances_problems, layout_of, layout_problems, process_problems
from swiftlite.plan.low_precision import low_precision_of, model_problems
from swiftlite.rules import common, engine_options
from swiftlite.rules.training import dpo, sft_lora, sft_vision, teacher


def model_to_audit_is_a_directory(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.model is not None and not facts.directory.is_dir():
        path = Path(args.model)
        hint = "give the directory of a Hugging Face model"
        if not path.exists():
            hint = near_path(path) or hint
        yield f"--model {path} is not a directory", hint


# Options that --engine uses with every engine; all other ones belong to one engine.
OF_ENGINES = ("trust_remote_code", "torch_dtype", "num_speculative_tokens")


def owners() -> dict[str, EngineInfo]:
    """Return the engine of each option of doctor that belongs to one engine, by option name."""
    known = options(DoctorArgs)
    found = {}
    for info in ENGINES.values():
        found |= {name: info for name in info.option_names if name in known}
    return found


def plan_options_have_plan(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.plan:
        return
    others = {"model", "plan", "engine", *OF_ENGINES, *owners()}
    for name, option in options(DoctorArgs).items():
        if name not in others and getattr(args, name) != option.default:
            yield f"--{name} {shell_line(getattr(args, name))} requires --plan", "add --plan"


def engine_options_have_engine(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.engine and args.plan:
        yield "--engine and --plan cannot be combined", "use one of them"
    if args.engine and args.model is None:
        yield f"--engine {args.engine} requires --model", "add --model DIRECTORY"
    if args.engine and not ENGINES[args.engine].known_report:
        yield from engine_options.missing_engine(ENGINES[args.engine], "engine")
    own = owners()
    for name in (*OF_ENGINES, *own):
        value = getattr(args, name)
        if value == options(DoctorArgs)[name].default or (name == "torch_dtype" and args.plan):
            continue
        owner = args.engine or names_with("dry_load")[0]
        if name in own:
            owner = own[name].name
        if args.engine is None:
            yield f"--{name} {shell_line(value)} requires --engine {owner}", f"add --engine {owner}"
        elif args.engine != owner:
            problem = f"--{name} {shell_line(value)} is not supported with --engine {args.engine}"
            yield problem, f"use --engine {owner}, or remove --{name}"


_OF_ALL_SIZES = (
    *(field.name for field in fields(RecomputeArgs)),
    "fused_kernels",
    "grad_reduce_in_bf16",
    "max_length",
    "micro_batch_size",
    "optimizer",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "torch_dtype",
    "use_distributed_optimizer",
)
"""Options of a plan without --model, which compares full training, adapters and heads."""


def _why_no_config(args: DoctorArgs, facts: Facts) -> Problem:
    hint = "give the directory of a Hugging Face model"
    try:
        read_config(facts.directory)
    except UserError as error:
        return f"--model {error.problem}", error.hint or hint
    return f"--model {args.model}: config.json has no settings", hint


def plan_fits_the_model(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan:
        return
    if args.model is None:
        for name in common.changed(args, set(options(DoctorArgs)) - {"plan", *_OF_ALL_SIZES}):
            problem = f"--{name} {shell_line(getattr(args, name))} with --plan requires --model"
            yield problem, "add --model DIRECTORY, or remove it to plan all sizes of Qwen3"
    elif facts.directory.is_dir() and not facts.hf_config:
        yield _why_no_config(args, facts)
    if any(True for _ in common.numbers_are_in_range(args, facts)) or not facts.hf_config:
        return  # no plan can be computed; a rule reports the reason
    layout = layout_of(args)
    setup = planned_setup(args, facts.hf_config)
    yield from layout_problems(layout, facts.architecture, setup.heads.layers)
    of_processes = process_problems(layout, setup.num_gpus)
    for problem, _ in of_processes:
        yield f"--num_gpus {args.num_gpus}: {problem}", "remove --num_gpus for the minimum of this layout"
    instances = args.num_distributed_optimizer_instances
    if of_processes or instances == 1:
        return
    if not setup.use_distributed_optimizer:
        problem = f"--num_distributed_optimizer_instances {instances} requires --use_distributed_optimizer true"
        yield problem, "add --use_distributed_optimizer true, or --num_gpus of several replicas"
    elif args.gpu_type is None:  # otherwise layouts are searched
        yield from instances_problems(layout, setup.num_gpus, instances)


def speed_has_a_gpu(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan:
        return
    if args.gpu_type is None:
        if args.global_batch_size:
            yield f"--global_batch_size {args.global_batch_size} requires --gpu_type", "add --gpu_type H100"
        return
    if args.gpu_type not in GPUS:
        yield f"unknown GPU: --gpu_type {args.gpu_type}", f"use one of {', '.join(GPUS)}"
    if args.num_gpus is None:
        yield f"--gpu_type {args.gpu_type} requires --num_gpus", "add --num_gpus 8"
    if args.loss_type:
        yield (
            f"--gpu_type {args.gpu_type} does not support --loss_type {args.loss_type}: speed is estimated only for "
            "megatron sft",
            "remove one of the two",
        )
    low = low_precision_of(planned_kernels(args))
    if low and args.gpu_type in GPUS and GPUS[args.gpu_type].capability < low.capability:
        yield (
            f"{low.flag} requires compute capability {low.capability}, but --gpu_type {args.gpu_type} has "
            f"{GPUS[args.gpu_type].capability}",
            "remove it, or use another --gpu_type",
        )
    if args.torch_dtype == "float32":
        yield (
            f"--gpu_type {args.gpu_type} does not support --torch_dtype float32: speed is estimated only for bfloat16",
            "remove --torch_dtype",
        )
    if args.optimizer_cpu_offload:
        yield (
            f"--gpu_type {args.gpu_type} does not support --optimizer_cpu_offload true: the host's speed is unknown",
            "remove one of the two",
        )


def draft_vocab_has_heads(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan or not args.draft_vocab or not facts.hf_config:
        return
    size = facts.hf_config.get("vocab_size", 0)
    if args.mtp_mode != "heads_only":
        yield (
            f"--draft_vocab {args.draft_vocab} requires a frozen trunk",
            "add --mtp_mode heads_only",
        )
    elif args.draft_vocab >= size:
        yield f"--draft_vocab {args.draft_vocab} must be below the model's vocab_size {size}", "use a smaller number"


def heads_are_planned(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan or not facts.hf_config or any(True for _ in common.numbers_are_in_range(args, facts)):
        return
    layers = planned_setup(args, facts.hf_config).heads.layers
    if args.mtp_mode != "heads_only":
        for name in common.changed(args, ("stream_trunk_gb",)):
            yield f"--{name} {shell_line(getattr(args, name))} requires --mtp_mode heads_only", "add it"
    if args.mtp_mode == "heads_only" and layers == 0:
        yield "--mtp_mode heads_only with --mtp_num_layers 0 trains nothing", "remove --mtp_num_layers"
    if args.mtp_unroll > 1 and layers != 1:
        yield (
            f"--mtp_unroll {args.mtp_unroll} requires exactly one MTP layer, but there are {layers}",
            "add --mtp_num_layers 1",
        )


def reference_fits_the_plan(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan:
        return
    if args.max_completion_length:
        return
    if args.loss_type is None or args.loss_type in WITHOUT_REFERENCE:
        for name in common.changed(args, _OF_REFERENCE):
            yield f"--{name} requires a --loss_type with a reference model", "use --loss_type sigmoid"
        return
    yield from dpo.reference_is_a_model(args, facts)
    if facts.hf_config and not any(True for _ in common.numbers_are_in_range(args, facts)):
        num_gpus = planned_setup(args, facts.hf_config).num_gpus
        yield from dpo.reference_layout_problems(args, replace(facts, world_size=num_gpus))


def kernels_are_planned(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan:
        return
    # A plan assumes GPUs with Transformer Engine and a kernel for packed rows.
    machine = Machine(is_cuda=True, has_transformer_engine=True, packed_kernel="torch_varlen")
    yield from kernel_problems(planned_kernels(args), machine, is_float32=args.torch_dtype == "float32")
    low = low_precision_of(planned_kernels(args))
    is_in_range = not any(True for _ in common.numbers_are_in_range(args, facts))
    if low and is_in_range and facts.architecture:
        yield from model_problems(low, layout_of(args), facts.architecture)


_OF_REFERENCE = ("ref_model", "ref_tensor_model_parallel_size", "ref_pipeline_model_parallel_size")


def a_plan_of_pairs_trains_the_trunk(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.plan and args.loss_type and args.mtp_mode == "heads_only":
        problem = "--loss_type plans megatron dpo, which does not support --mtp_mode heads_only"
        yield problem, "remove one of the two"


def images_are_planned(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan:
        return
    given = f"--images_per_row {args.images_per_row}"
    if not args.images_per_row:
        for name in common.changed(args, _OF_IMAGES):
            yield f"--{name} requires --images_per_row", "add --images_per_row 1"
        return
    if args.gpu_type:
        yield f"{given} is not supported with --gpu_type: speed is estimated for rows without images", "remove one"
    if args.loss_type:
        yield f"{given} is not supported with --loss_type: images are planned for megatron sft", "remove one"
    max_pixels = args.max_pixels or facts.max_pixels
    sizes = image_sizes(facts.hf_config)
    if sizes is None and facts.hf_config:
        yield f"{given} requires a model with a vision tower", "remove it"
    elif max_pixels is None:
        problem = f"{given} requires --max_pixels, because the model has no maximum in preprocessor_config.json"
        yield problem, "add --max_pixels 1003520"
    elif sizes is not None:
        yield from common.max_pixels_has_an_item(max_pixels, sizes)
        num_items = args.images_per_row * (max_pixels // sizes.group_size**2)
        if num_items > args.max_length:
            problem = f"{given} with --max_pixels {max_pixels}: {num_items} tokens, over --max_length"
            yield f"{problem} {args.max_length}", f"use --max_length {num_items} or more, or a smaller --max_pixels"
    yield from sft_vision.frozen_parts_can_be_trained(args, facts)
    yield from sft_vision.something_is_trained(args, facts)


def rollouts_are_planned(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan:
        return
    if args.max_completion_length is None:
        for name in common.changed(args, ("max_batch_size", "beta")):
            yield f"--{name} requires --max_completion_length", "add --max_completion_length 256"
        return
    given = f"--max_completion_length {args.max_completion_length} plans megatron grpo"
    for name in common.changed(args, ("gpu_type", "loss_type", "images_per_row", *_OF_REFERENCE[1:])):
        yield f"{given}, which does not support --{name} in a plan", "remove one of the two"
    if args.mtp_mode == "heads_only":
        yield f"{given}, which does not support --mtp_mode heads_only", "remove one of the two"
    if args.max_completion_length >= args.max_length:
        problem = f"{given} without room for a prompt within --max_length {args.max_length}"
        yield problem, f"use --max_length {2 * args.max_completion_length}"
    if args.ref_model and not args.beta:
        yield f"--ref_model {args.ref_model} requires --beta", "add --beta 0.1"
    yield from dpo.reference_is_a_model(args, facts)


def teacher_is_planned(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan or args.teacher_model is None:
        return
    command = "grpo" if args.max_completion_length else "gkd"
    given = f"--teacher_model {args.teacher_model} plans megatron {command}"
    for name in common.changed(args, ("gpu_type", "loss_type", "images_per_row")):
        yield f"{given}, which does not support --{name} in a plan", "remove one of the two"
    if args.mtp_mode == "heads_only":
        yield f"{given}, which does not support --mtp_mode heads_only", "remove one of the two"
    yield from teacher.teacher_is_a_model(args, facts)
    yield from teacher.teacher_fits_the_layout(args, facts)


_OF_IMAGES = ("max_pixels", "freeze_vit", "freeze_aligner", "freeze_llm", "vit_gradient_checkpointing")


def lengths_are_supported(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.plan:
        yield from common.rows_have_a_supported_length(args, facts)


def adapters_are_planned(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.plan:
        yield from sft_lora.lora_options_have_adapters(args, facts)


RULES = (
    model_to_audit_is_a_directory,
    common.numbers_are_in_range,
    plan_options_have_plan,
    engine_options_have_engine,
    engine_options.options_of_engines_agree,
    plan_fits_the_model,
    lengths_are_supported,
    speed_has_a_gpu,
    draft_vocab_has_heads,
    heads_are_planned,
    reference_fits_the_plan,
    a_plan_of_pairs_trains_the_trunk,
    adapters_are_planned,
    images_are_planned,
    teacher_is_planned,
    rollouts_are_planned,
    kernels_are_planned,
    common.recompute_options_fit,
    common.gradients_have_the_dtype_of_weights,
    common.optimizer_can_be_offloaded,
)
NOTES = ()
