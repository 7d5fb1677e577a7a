"""Rules of `doctor`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from swiftlite.args.command_line import as_typed
from swiftlite.args.commands import DoctorArgs
from swiftlite.args.config import Problem
from swiftlite.args.docs import options
from swiftlite.engines.index import ENGINES, names_with
from swiftlite.engines.info import EngineInfo
from swiftlite.estimate.gpus import GPUS
from swiftlite.estimate.setup import planned_kernels, planned_setup
from swiftlite.methods.dpo import WITHOUT_REFERENCE
from swiftlite.plan.facts import Facts, near_path
from swiftlite.plan.kernels import Machine, kernel_problems
from swiftlite.plan.layout import layout_of, layout_problems, process_problems
from swiftlite.plan.low_precision import low_precision_of, model_problems
from swiftlite.rules import common, engine
from swiftlite.rules.training import dpo, sft_lora


def model_to_audit_is_a_directory(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.model is not None and not facts.directory.is_dir():
        path = Path(args.model)
        near = "" if path.exists() else near_path(path)
        yield f"--model {path} is no directory", near or "give the directory of a Hugging Face model"


# Options of --engine that apply to every engine; each other one belongs to one engine.
OF_ENGINES = ("trust_remote_code", "torch_dtype", "num_speculative_tokens")


def owners() -> dict[str, EngineInfo]:
    """Return the options of doctor that belong to one engine, each with its engine."""
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
            yield f"--{name} {as_typed(getattr(args, name))} without a plan", "add --plan"


def engine_options_have_engine(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.engine and args.plan:
        yield "--engine and --plan are two different questions", "ask one at a time"
    if args.engine and args.model is None:
        yield f"--engine {args.engine} needs a model", "add --model DIRECTORY, a Hugging Face model's"
    if args.engine and not ENGINES[args.engine].known_report:
        yield from engine.missing_engine(ENGINES[args.engine], "engine")
    own = owners()
    for name in (*OF_ENGINES, *own):
        value = getattr(args, name)
        if value == options(DoctorArgs)[name].default or (name == "torch_dtype" and args.plan):
            continue
        owner = args.engine or names_with("dry_load")[0]
        if name in own:
            owner = own[name].name
        if args.engine is None:
            yield f"--{name} {as_typed(value)} without an engine", f"add --engine {owner}"
        elif args.engine != owner:
            yield f"--{name} {as_typed(value)} with --engine {args.engine}", f"it is for --engine {owner}"


def plan_fits_the_model(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan:
        return
    if args.model is None:
        yield "--plan needs a model", "add --model DIRECTORY, a Hugging Face model's; its config.json is enough"
    elif facts.directory.is_dir() and not facts.hf_config:
        yield (
            f"--model {args.model} has no config.json that is a JSON object with a model's settings",
            "give a Hugging Face model's",
        )
    if any(True for _ in common.numbers_are_in_range(args, facts)) or not facts.hf_config:
        return  # no plan can be computed; this or another rule reports why
    layout = layout_of(args)
    setup = planned_setup(args, facts.hf_config)
    yield from layout_problems(layout, facts.architecture, setup.heads.layers)
    for problem, _ in process_problems(layout, setup.num_gpus):
        yield f"--num_gpus {args.num_gpus}: {problem}", "leave --num_gpus out for the fewest that this layout takes"


def speed_has_a_gpu(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan:
        return
    if args.gpu_type is None:
        if args.global_batch_size:
            yield f"--global_batch_size {args.global_batch_size}: memory is the same for all", "add --gpu_type H100"
        return
    if args.gpu_type not in GPUS:
        known = ", ".join(GPUS)
        yield f"--gpu_type {args.gpu_type} is none that is known here", f"use one of {known}"
    if args.num_gpus is None:
        yield f"--gpu_type {args.gpu_type} without a number of GPUs to lay the model out on", "add --num_gpus 8"
    if args.loss_type:
        yield (
            f"--gpu_type {args.gpu_type} with --loss_type {args.loss_type}: speed is estimated for megatron sft alone",
            "leave one of the two out",
        )
    low = low_precision_of(planned_kernels(args))
    if low and args.gpu_type in GPUS and GPUS[args.gpu_type].capability < low.capability:
        yield (
            f"{low.flag}: Transformer Engine has it from compute capability {low.capability} on, {args.gpu_type} has "
            f"{GPUS[args.gpu_type].capability}",
            "leave it out, or plan for another --gpu_type",
        )
    if args.torch_dtype == "float32":
        yield f"--gpu_type {args.gpu_type} with --torch_dtype float32: speed is estimated for bfloat16", "leave it out"


def draft_vocab_has_heads(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan or not args.draft_vocab or not facts.hf_config:
        return
    size = facts.hf_config.get("vocab_size", 0)
    if args.mtp_mode != "heads_only":
        yield (
            f"--draft_vocab {args.draft_vocab}, which heads learn behind a trunk that stays",
            "add --mtp_mode heads_only",
        )
    elif args.draft_vocab >= size:
        yield f"--draft_vocab {args.draft_vocab}, but the model's whole vocabulary is {size}", "choose fewer"


def heads_are_planned(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan or not facts.hf_config or any(True for _ in common.numbers_are_in_range(args, facts)):
        return
    layers = planned_setup(args, facts.hf_config).heads.layers
    if args.mtp_mode == "heads_only" and layers == 0:
        yield "--mtp_mode heads_only with --mtp_num_layers 0, so nothing would learn", "leave --mtp_num_layers out"
    if args.mtp_unroll > 1 and layers != 1:
        yield (
            f"--mtp_unroll {args.mtp_unroll} applies one MTP layer again and again, but there are {layers}",
            "add --mtp_num_layers 1",
        )


def reference_fits_the_plan(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if not args.plan:
        return
    if args.loss_type is None or args.loss_type in WITHOUT_REFERENCE:
        for name in common.changed(args, _OF_REFERENCE):
            why = f"--loss_type is {args.loss_type}" if args.loss_type else "without --loss_type"
            yield f"--{name}, but the plan has no reference model: {why}", "add --loss_type sigmoid"
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
        yield "--loss_type plans megatron dpo, which has no --mtp_mode heads_only", "leave one of the two out"


def adapters_are_planned(args: DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.plan:
        yield from sft_lora.lora_options_have_adapters(args, facts)


RULES = (
    model_to_audit_is_a_directory,
    common.numbers_are_in_range,
    plan_options_have_plan,
    engine_options_have_engine,
    engine.options_of_engines_agree,
    plan_fits_the_model,
    speed_has_a_gpu,
    draft_vocab_has_heads,
    heads_are_planned,
    reference_fits_the_plan,
    a_plan_of_pairs_trains_the_trunk,
    adapters_are_planned,
    kernels_are_planned,
    common.recompute_options_fit,
)
NOTES = ()
