"""Print the planned memory of a training run (`swiftlite doctor --plan`)."""

import dataclasses

from swiftlite.args.command_line import typed
from swiftlite.args.commands import PlanArgs, SftArgs
from swiftlite.args.docs import unsupported
from swiftlite.base.heads import MTP
from swiftlite.cli.memory_tables import GB, MemoryTable, memory_tables
from swiftlite.families.family import HfConfig
from swiftlite.families.index import FAMILIES, architecture_of
from swiftlite.plan.cost import memory
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.cost.setup import Setup, images_of
from swiftlite.plan.cost.streamed_memory import describe_streamed
from swiftlite.plan.cost.suggestion import LARGEST_DOUBLING, suggest
from swiftlite.plan.facts import Facts
from swiftlite.plan.layout import data_parallel_size
from swiftlite.plan.run import plan_of


def report_memory(args: PlanArgs, run: SftArgs, facts: Facts) -> bool:
    """Print the memory of ranks, and whether it fits into the GPU. If a training step does not fit, also print a
    suggestion.

    Args:
        run: options of the planned run.

    Returns:
        Whether the run fits.
    """
    hf_config = facts.hf_config
    plan = plan_of(run, facts)
    setup = Setup.of(run, plan, images_of(run, facts, args.images_per_row))
    gpu_memory_gb = args.gpu_memory_gb or memory.USUAL_GPU_MEMORY_GB
    usable = memory.usable_bytes(gpu_memory_gb)
    training, *others = memory_tables(run, facts, setup)
    fits = training.peak <= usable
    print(f"{run.model}\n{_describe(setup)}\n")
    print("\n".join(training.lines))
    reserve = f"{memory.RESERVE:.0%} of {gpu_memory_gb:g} GB is reserved for CUDA, NCCL and fragmentation"
    print(f"\n{_verdict(training, usable)}; {reserve}")
    if not fits:
        print(_suggestion(run, facts, setup, gpu_memory_gb))
    if setup.mtp_mode == "heads_only" and setup.heads.layers:
        print(f"\n{_cached_trunk(hf_config, setup)}")
        if setup.layout.pipeline_model_parallel_size == 1 and setup.low_precision is None:
            print(describe_streamed(hf_config, setup, plan.trunk))
    for table in others:
        print("\n".join(["", *table.lines, "", _verdict(table, usable)]))
        if table.peak > usable:
            print(f"    {table.hint}")
            fits = False
    return fits


def _verdict(table: MemoryTable, usable: int) -> str:
    verdict = "fits"
    if table.peak > usable:
        verdict = "does not fit"
    return f"{verdict}: {table.peak / GB:.1f} GB {table.where}, {usable / GB:.1f} GB usable"


def _cached_trunk(hf_config: HfConfig, setup: Setup) -> str:
    """Return a description of the estimated size and savings of --cache_trunk_states."""
    first, later = (
        training_flops(hf_config, setup.heads, heads_only=True, trunk_is_read=is_read).per_token
        for is_read in (False, True)
    )
    drafting = FAMILIES[hf_config["model_type"]].drafting_of(hf_config, setup.heads)
    # Of the loss, of heads that read the state before the final norm, and of each layer that a drafter reads.
    num_states = 1 + drafting.takes_before_norm + len(setup.heads.features)
    gigabytes = 1e6 * architecture_of(hf_config).outside.hidden * setup.parameter_bytes / GB
    outputs = ""
    if setup.images is not None:
        outputs = f", and {gigabytes:.2f} GB more per million tokens of images"
    return (
        f"--cache_trunk_states: {num_states * gigabytes:.2f} GB on disk per million tokens{outputs}; "
        f"epochs that read them require {later / first:.0%} of the FLOPs"
    )


def _describe(setup: Setup) -> str:
    layout = setup.layout
    sizes = {
        "tensor": layout.tensor_model_parallel_size,
        "pipeline": layout.pipeline_model_parallel_size,
        "context": layout.context_parallel_size,
        "data": data_parallel_size(layout, setup.num_gpus),
    }
    parts = [f"{name} parallel {size}" for name, size in sizes.items() if size > 1 or name == "data"]
    experts = ""
    if layout.expert_model_parallel_size > 1:
        experts = f", expert parallel {layout.expert_model_parallel_size}"
    rows = f"micro-batches of {setup.micro_batch_size} x {setup.max_length} tokens"
    if setup.images:
        rows += f", {setup.images.items_per_row} per row from images"
    gpus = f"{setup.num_gpus} GPUs"
    if setup.num_gpus == 1:
        gpus = "1 GPU"
    recompute = f"recompute {setup.recompute.recompute_granularity}"
    return f"{gpus} = {' x '.join(parts)}{experts}; {rows}, {recompute}{_kernels(setup)}{_heads(setup)}"


def _heads(setup: Setup) -> str:
    heads = setup.heads
    if not heads.layers:
        return ""
    text = f", {heads.name} ({setup.mtp_mode})"
    if heads.kind == MTP:
        text = f", MTP depth {heads.layers} ({setup.mtp_mode})"
    if heads.unroll > 1:
        text += f" unrolled {heads.unroll} times"
    if heads.draft_vocab:
        text += f" with {len(heads.draft_vocab)} draft tokens"
    return text


def _kernels(setup: Setup) -> str:
    fused = ""
    if setup.is_fused:
        fused = ", fused kernels"
    if setup.transformer_impl == "transformer_engine":
        fused += ", Transformer Engine"
    if setup.low_precision:
        fused += f", {setup.low_precision.described}"
    return fused


def _suggestion(run: SftArgs, facts: Facts, setup: Setup, gpu_memory_gb: float) -> str:
    """Return a description of options with which the run fits."""

    def tables(candidate: Setup) -> list[MemoryTable]:
        # The models next to the trained one have its layout, except for the sizes that the --ref_... options and
        # similar ones set; they read it from the options.
        options = vars(candidate.layout) | vars(candidate.recompute)
        return memory_tables(dataclasses.replace(run, **options), facts, candidate)

    def others_fit(candidate: Setup) -> bool:
        try:
            others = tables(candidate)[1:]
        except ValueError:  # another model of the run does not support the layout that this one gives it
            return False
        return all(table.peak <= memory.usable_bytes(gpu_memory_gb) for table in others)

    better = suggest(facts.hf_config, setup, gpu_memory_gb, others_fit)
    if better is None:
        most = setup.num_gpus << LARGEST_DOUBLING
        if suggest(facts.hf_config, setup, gpu_memory_gb) is None:
            return f"    no layout fits on up to {most} GPUs; use {_smaller(run)}"
        return f"    no layout fits on up to {most} GPUs with the other models and the engine of the run, see below"
    flags, removed = [], []
    for part in (better.layout, better.recompute):
        default = type(part)()
        for name, value in vars(part).items():
            if value != getattr(default, name):
                flags.append(typed(name, value))
            elif getattr(run, name) != value:
                removed.append(f"--{name}")
    if better.use_distributed_optimizer:
        flags.append("--use_distributed_optimizer true")
    words = " ".join(flags)
    if removed:
        words += f", without {' and '.join(removed)}"
    total = max(table.peak for table in tables(better))
    gpus = f"{better.num_gpus} GPUs"
    if better.num_gpus == setup.num_gpus:
        gpus = "the same GPUs"
    return f"    fits with {total / GB:.1f} GB, on {gpus}: {words}"


def _smaller(run: SftArgs) -> str:
    """Return the options with which a run needs less memory, without those that it has or that its command lacks."""
    smaller = "a smaller --max_length"
    if run.micro_batch_size > 1:
        smaller += " or --micro_batch_size"
    if run.mtp_mode != "heads_only" and "mtp_mode" not in unsupported(type(run)):
        smaller += ", --mtp_mode heads_only"
    if run.tuner_type != "lora" and run.mtp_mode != "heads_only":
        smaller += ", --tuner_type lora"
    return smaller
