"""Describe the memory of a run as tables, for `doctor --plan` and `--dry_run`."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from swiftlite.args.commands import DpoArgs, GkdArgs, GrpoArgs, SftArgs
from swiftlite.bridge.encoding.quantization import describe_quantization
from swiftlite.engines.index import ENGINES
from swiftlite.families.index import image_sizes
from swiftlite.methods.index import method_of
from swiftlite.plan.cost import memory
from swiftlite.plan.cost.frozen_memory import (
    before_first_step,
    bytes_of_reward_process,
    frozen_weights,
    reference_parts,
    reward_configs,
    reward_weights,
    teacher_weights,
)
from swiftlite.plan.cost.rollout_memory import estimate_rollouts, rollout_flops
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.cost.streamed_memory import estimate_streamed
from swiftlite.plan.facts import Facts
from swiftlite.plan.policy import is_base_of_adapters, reference_layout
from swiftlite.plan.preference import preference_of
from swiftlite.plan.run import Plan
from swiftlite.report.table import text_table

GB = 1e9
_COLUMNS = ("stage", "parameters", "weights", "gradients", "optimizer", "activations", "logits", "total", "holds")
_COLUMNS_OF_REFERENCE = ("stage", "model", "reference", "a layer", "logits", "total", "in training")


@dataclass(frozen=True)
class MemoryTable:
    """The memory of ranks at one time of a run.

    Attributes:
        lines: the table with its heading and notes.
        peak: the largest total in bytes.
        where: where the peak is, such as "on stage 0".
        hint: what reduces the peak.
    """

    lines: list[str]
    peak: int
    where: str
    hint: str = ""


def memory_section(args: SftArgs, plan: Plan, facts: Facts) -> str:
    """Return the text about memory that `--dry_run` prints; empty if the sizes of the model are unknown."""
    if facts.architecture is None:
        return ""
    setup, lines = Setup.of(args, plan), []
    if plan.trunk.holds_layers:
        for table in memory_tables(args, facts, setup):
            lines += table.lines
    else:
        lines.append(estimate_streamed(facts.hf_config, setup).line)
    if image_sizes(facts.hf_config):
        lines.append("for rows without images; doctor --plan --images_per_row also counts images")
    return "\nmemory\n" + textwrap.indent("\n".join(lines), "  ")


def memory_tables(args: SftArgs, facts: Facts, setup: Setup) -> list[MemoryTable]:
    """Return the memory of a training step, and of what the method loads in addition to the trained model."""
    stages = memory.estimate(facts.hf_config, setup)
    tables = [_stages_table(facts, setup, stages)]
    if isinstance(args, DpoArgs) and preference_of(args).needs_reference:
        tables.append(_reference_table(args, facts, setup, stages))
    if isinstance(args, GrpoArgs | GkdArgs) and (frozen := _frozen(args, facts, setup)):
        tables.append(_frozen_table(args, frozen, stages))
    if isinstance(args, GrpoArgs) and not (args.rollout_server or args.rollouts_from):
        tables.append(_rollouts_table(args, facts, setup, stages))
    return tables


def _stages_table(facts: Facts, setup: Setup, stages: list[memory.StageMemory]) -> MemoryTable:
    lines = ["GB (1e9 bytes) on one rank of each pipeline stage"]
    lines.append(text_table([_COLUMNS, *map(_stage_row, range(len(stages)), stages)], indent="  ", numbers=True))
    if any(stage.in_flight > 1 for stage in stages):
        lines.append("  (xN): activations of N forward passes in flight")
    if setup.low_precision:
        copies = max(stage.quantized for stage in stages)
        lines.append(f"  weights: including {copies / GB:.2f} GB of copies in low precision")
    if setup.offload_fraction:
        moved, host = max(stage.offloaded for stage in stages), max(stage.host for stage in stages)
        on_host = f"{moved / GB:.2f} GB of moments on the host, where a rank uses {host / GB:.2f} GB"
        lines.append(f"  optimizer: without {on_host}")
    if quantization := describe_quantization(facts.hf_config):
        lines.append(f"  weights: the model is quantized ({quantization}) and decoded when it is loaded")
    most = memory.largest(stages)
    return MemoryTable(lines, most.total, f"on stage {stages.index(most)}")


def _stage_row(number: int, stage: memory.StageMemory) -> tuple[str, ...]:
    """Return the table row with the memory of one rank of a pipeline stage, with the columns _COLUMNS."""
    activations = f"{(stage.activations + stage.recomputed) / GB:.2f}"
    if stage.in_flight > 1:
        activations += f" (x{stage.in_flight})"
    state = _cells(stage.weights + stage.quantized, stage.gradients, stage.optimizer)
    return (str(number), f"{stage.parameters:,}", *state, activations, *_cells(stage.logits, stage.total), stage.holds)


def _cells(*sizes: int) -> tuple[str, ...]:
    return tuple(f"{size / GB:.2f}" for size in sizes)


def _reference_table(args: DpoArgs, facts: Facts, setup: Setup, stages: list[memory.StageMemory]) -> MemoryTable:
    """Return the memory of ranks of `megatron dpo` before the first step."""
    config = facts.hf_config
    if args.ref_model:
        _, config = facts.described("ref_model")
    rows: list[tuple[str, ...]] = [_COLUMNS_OF_REFERENCE]
    totals = []
    for number, (stage, part) in enumerate(zip(stages, reference_parts(args, setup, config), strict=True)):
        model = before_first_step(stage)
        totals.append(model + part.total)
        rows.append((str(number), *_cells(model, part.weights, part.layer, part.logits, totals[-1], stage.total)))
    lines = [
        "GB on one rank before the first step, while the reference model runs; it is freed before training",
        text_table(rows, indent="  ", numbers=True),
        "  (model: weights, gradients and float32 weights, without the optimizer's moments)",
        "  (reference: the largest part of it on a rank of the stage)",
    ]
    hint = "increase --ref_tensor_model_parallel_size or --ref_pipeline_model_parallel_size"
    return MemoryTable(lines, max(totals), f"on stage {totals.index(max(totals))}", hint)


def _frozen(args: GrpoArgs | GkdArgs, facts: Facts, setup: Setup) -> dict[str, list[int]]:
    """Return the bytes of the models whose weights stay in memory, on a rank of each stage of the trained model."""
    frozen = {}
    if isinstance(args, GrpoArgs) and args.beta and not is_base_of_adapters(args, setup.lora):
        config = facts.hf_config
        if args.ref_model:
            _, config = facts.described("ref_model")
        frozen["reference"] = frozen_weights(setup, reference_layout(args), config)
    if args.teacher_model:
        frozen["teacher"] = teacher_weights(args, setup, facts.described("teacher_model")[1])
    if isinstance(args, GrpoArgs) and (configs := reward_configs(args)):
        frozen["reward"] = reward_weights(args, setup, configs)
    elif isinstance(args, GrpoArgs) and facts.machine.is_cuda and (size := bytes_of_reward_process(args)):
        frozen["reward"] = [size, *[0] * (setup.layout.pipeline_model_parallel_size - 1)]
    return frozen


_FROZEN = {"reference": "reference model", "teacher": "teacher", "reward": "reward model"}


def _frozen_table(
    args: GrpoArgs | GkdArgs, frozen: Mapping[str, list[int]], stages: list[memory.StageMemory]
) -> MemoryTable:
    """Return the memory of ranks with the weights of `_frozen`."""
    rows: list[tuple[str, ...]] = [("stage", "model", *frozen, "total")]
    totals = []
    for number, (stage, *weights) in enumerate(zip(stages, *frozen.values(), strict=True)):
        totals.append(stage.total + sum(weights))
        rows.append((str(number), *_cells(stage.total, *weights, totals[-1])))
    words = " and ".join(_FROZEN[name] for name in frozen)
    heading = f"GB on one rank with {words}, whose weights stay in memory ({method_of(args).words})"
    sizes = ", ".join(f"--{name.removesuffix('erence')}_tensor_model_parallel_size" for name in frozen)
    hint = f"increase {sizes}, --tensor_model_parallel_size or the pipeline sizes"
    return MemoryTable([heading, text_table(rows, indent="  ", numbers=True)], max(totals), f"with {words}", hint)


def sleeps_in_training(args: GrpoArgs) -> bool:
    """Return whether the engine of a run on GPUs frees its memory while the trainer trains."""
    kwargs = args.vllm_engine_kwargs or {}
    return ENGINES[args.infer_backend].shares_gpu(kwargs) and kwargs.get("enable_sleep_mode") is not False


def _rollouts_table(args: GrpoArgs, facts: Facts, setup: Setup, stages: list[memory.StageMemory]) -> MemoryTable:
    """Return the memory of the GPU that trainer and engine share, and the FLOPs of completions."""
    config = facts.hf_config
    frozen = {name: weights[0] for name, weights in _frozen(args, facts, setup).items()}
    sleeps = facts.machine.is_cuda and not args.async_rollouts and sleeps_in_training(args)
    shared = estimate_rollouts(args, setup, stages, config, frozen, sleeps=sleeps)
    rows: list[tuple[str, ...]] = [("trainer", "reference", "teacher", "reward", "engine", "KV cache", "total")]
    rows += [_cells(*sizes) for sizes in shared.phases.values()]
    drawn, trained = rollout_flops(config, setup, args.max_completion_length)
    of_row = f"{args.max_completion_length} tokens, of a row of {setup.max_length}"
    lines = [
        "GB on the GPU of the first rank, which the engine shares (megatron grpo)",
        text_table(rows, indent="  ", numbers=True),
        *["  (first line: training, while the engine sleeps; second line: drawing)"] * sleeps,
        f"  (KV cache: {args.max_batch_size} sequences of {setup.max_length} tokens)",
        f"  FLOPs for a completion of {of_row}: {drawn:.2g} to draw without drafts, {trained:.2g} to train on",
    ]
    hint = "use a smaller --max_batch_size or --max_length, or more GPUs for the trainer"
    return MemoryTable(lines, shared.total, "with the engine", hint)
