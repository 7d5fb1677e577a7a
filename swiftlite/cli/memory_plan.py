"""Print the planned memory of a training run (`swiftlite doctor --plan`)."""

from typing import Any

from swiftlite.args.commands import DoctorArgs
from swiftlite.bridge.encoding.quantization import describe_quantization
from swiftlite.cli.reference_plan import report_reference
from swiftlite.cli.rollout_plan import report_rollouts
from swiftlite.cli.teacher_plan import report_teacher
from swiftlite.families.index import FAMILIES, architecture_of
from swiftlite.plan.cost import memory
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.cost.gpus import GPUS
from swiftlite.plan.cost.setup import Setup, planned_setup
from swiftlite.plan.cost.streamed_memory import estimate_streamed
from swiftlite.plan.cost.suggestion import LARGEST_DOUBLING, suggest
from swiftlite.plan.cost.timing import PRODUCT_EFFICIENCY
from swiftlite.plan.facts import Facts
from swiftlite.plan.layout import data_parallel_size
from swiftlite.report.table import text_table

GB = 1e9
_COLUMNS = ("stage", "parameters", "weights", "gradients", "optimizer", "activations", "logits", "total", "holds")


def report_memory(args: DoctorArgs, facts: Facts) -> bool:
    """Print the memory of a rank of each pipeline stage, and whether it fits into the GPU. If not, also print a
    suggestion.

    Return whether it fits.
    """
    hf_config = facts.hf_config
    setup = planned_setup(args, hf_config, facts.max_pixels)
    stages = memory.estimate(hf_config, setup)
    print(f"{args.model}\n{_describe(setup)}\n\nGB (1e9 bytes) on one rank of each pipeline stage")
    print(text_table([_COLUMNS, *map(_stage_row, range(len(stages)), stages)], indent="  ", numbers=True))
    if any(stage.in_flight > 1 for stage in stages):
        print("  (xN): activations of N forward passes in flight")
    if setup.low_precision:
        copies = max(stage.quantized for stage in stages)
        print(f"  weights: including {copies / GB:.2f} GB of copies in low precision")
    if setup.offload_fraction:
        moved, host = max(stage.offloaded for stage in stages), max(stage.host for stage in stages)
        print(f"  optimizer: without {moved / GB:.2f} GB of moments on the host, where a rank uses {host / GB:.2f} GB")
    if quantization := describe_quantization(hf_config):
        print(f"  weights: the model is quantized ({quantization}) and decoded when it is loaded")

    gpu_memory_gb = args.gpu_memory_gb or memory.USUAL_GPU_MEMORY_GB
    most, usable = memory.largest(stages), memory.usable_bytes(gpu_memory_gb)
    fits = most.total <= usable
    print(
        f"\n{memory.verdict(fits)}: {most.total / GB:.1f} GB on stage {stages.index(most)}, {usable / GB:.1f} GB "
        f"usable; {memory.RESERVE:.0%} of {gpu_memory_gb:g} GB is reserved for CUDA, NCCL and fragmentation"
    )
    if not fits:
        print(_suggestion(hf_config, setup, gpu_memory_gb))
    if setup.mtp_mode == "heads_only" and setup.heads.layers:
        print(f"\n{_cached_trunk(hf_config, setup)}")
        if setup.layout.pipeline_model_parallel_size == 1 and setup.low_precision is None:
            print(_streamed_trunk(hf_config, setup, args.stream_trunk_gb))
    reports = [report(args, facts, setup, stages) for report in (report_reference, report_teacher, report_rollouts)]
    return all(reports) and fits


def _cached_trunk(hf_config: dict[str, Any], setup: Setup) -> str:
    """Return a description of the estimated size and savings of --cache_trunk_states."""
    first, later = (
        training_flops(hf_config, setup.heads, heads_only=True, trunk_is_read=is_read).per_token
        for is_read in (False, True)
    )
    drafting = FAMILIES[hf_config["model_type"]].mtp.drafting
    num_states = 1
    if drafting.takes_before_norm:  # these heads read other states than the loss
        num_states = 2
    gigabytes = 1e6 * architecture_of(hf_config).outside.hidden * setup.parameter_bytes / GB
    outputs = ""
    if setup.images is not None:
        outputs = f", and {gigabytes:.2f} GB more per million tokens of images"
    return (
        f"--cache_trunk_states: {num_states * gigabytes:.2f} GB on disk per million tokens{outputs}; "
        f"epochs that read them require {later / first:.0%} of the FLOPs"
    )


def _streamed_trunk(hf_config: dict[str, Any], setup: Setup, states_gb: float) -> str:
    """Return a description of the estimated memory and time of --stream_trunk.

    Args:
        states_gb: memory of the host for waiting states (--stream_trunk_gb).
    """
    streamed = estimate_streamed(hf_config, setup)
    flops = 1e6 * streamed.flops_per_token
    seconds = flops / (GPUS["H100"].peak_flops * PRODUCT_EFFICIENCY * setup.num_gpus)
    passes = streamed.passes(1e6, states_gb)
    return (
        f"--stream_trunk: {streamed.peak / GB:.2f} GB on one rank; for one million tokens, layers of "
        f"{streamed.trunk / GB:.1f} GB are read {passes} times, and {flops:.2g} FLOPs take about "
        f"{seconds:.0f} s on {setup.num_gpus} H100"
    )


def _stage_row(number: int, stage: memory.StageMemory) -> tuple[str, ...]:
    """Return the table row with the memory of one rank of a pipeline stage, with the columns _COLUMNS."""
    activations = f"{(stage.activations + stage.recomputed) / GB:.2f}"
    if stage.in_flight > 1:
        activations += f" (x{stage.in_flight})"
    return (
        str(number),
        f"{stage.parameters:,}",
        f"{(stage.weights + stage.quantized) / GB:.2f}",
        f"{stage.gradients / GB:.2f}",
        f"{stage.optimizer / GB:.2f}",
        activations,
        f"{stage.logits / GB:.2f}",
        f"{stage.total / GB:.2f}",
        stage.holds,
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


def _suggestion(hf_config: dict[str, Any], setup: Setup, gpu_memory_gb: float) -> str:
    """Return a description of options with which the run fits."""
    better = suggest(hf_config, setup, gpu_memory_gb)
    if better is None:
        most = setup.num_gpus << LARGEST_DOUBLING
        smaller = "a smaller --max_length or --micro_batch_size, --mtp_mode heads_only or --tuner_type lora"
        return f"    no layout fits on up to {most} GPUs; use {smaller}"
    flags = []
    for part in (better.layout, better.recompute):
        default = type(part)()
        flags += [f"--{name} {value}" for name, value in vars(part).items() if value != getattr(default, name)]
    if better.use_distributed_optimizer:
        flags.append("--use_distributed_optimizer true")
    total = memory.largest(memory.estimate(hf_config, better)).total
    gpus = f"{better.num_gpus} GPUs"
    if better.num_gpus == setup.num_gpus:
        gpus = "the same GPUs"
    words = " ".join(flags).replace("True", "true")
    return f"    fits with {total / GB:.1f} GB, on {gpus}: {words}"
