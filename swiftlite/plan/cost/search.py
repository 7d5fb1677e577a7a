"""Search the parallel layouts of a model on a number of GPUs, fastest first (`doctor --plan --gpu_type`).

`speed.py` estimates the speed. A candidate consists of the user's options, with values for options that are not set, so
that it can be printed as a command line.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from swiftlite.args.commands import SftArgs
from swiftlite.families.architecture import Architecture
from swiftlite.families.index import architecture_of
from swiftlite.plan.cost.gpus import Gpu
from swiftlite.plan.cost.memory import largest, usable_bytes
from swiftlite.plan.cost.setup import Setup, is_possible
from swiftlite.plan.cost.speed import Step
from swiftlite.plan.facts import Facts
from swiftlite.plan.layout import (
    data_parallel_size,
    instances_problems,
    layout_of,
    num_virtual_stages,
    process_problems,
)
from swiftlite.plan.run import plan_of

_ROWS = [1, 2, 4, 8]
"""Micro-batch sizes to try; larger sizes do not make matrix products faster."""
_VIRTUAL_STAGES = [2, 3, 4, 6, 8]
DOUBLINGS = 7
"""Maximum number of times that the number of GPUs is doubled if no layout fits."""
_DEFAULTS = SftArgs()


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Options with a complete layout, and the estimated training step with these options."""

    args: SftArgs
    step: Step

    @property
    def bytes(self) -> int:
        """Memory of the rank with the largest memory, in bytes."""
        return largest(self.step.memory).total


def ranked(args: SftArgs, facts: Facts, gpu: Gpu, gpu_memory_gb: float) -> list[Candidate]:
    """Return the layouts that the model and the global batch size allow and that fit into memory, fastest first."""
    found = list(_fitting(args, facts, gpu, gpu_memory_gb))
    return sorted(found, key=lambda candidate: -candidate.step.tokens_per_second)


def larger(args: SftArgs, facts: Facts, gpu: Gpu, gpu_memory_gb: float) -> tuple[int, int] | None:
    """Search with 2, 4, ... times the GPUs and the global batch size until a layout fits.

    Returns:
        The number of GPUs and the global batch size; None if no layout fits.
    """
    for doublings in range(1, DOUBLINGS + 1):
        num_gpus, batch = facts.world_size << doublings, args.global_batch_size << doublings
        more = dataclasses.replace(args, global_batch_size=batch)
        if any(True for _ in _fitting(more, dataclasses.replace(facts, world_size=num_gpus), gpu, gpu_memory_gb)):
            return num_gpus, batch
    return None


def _fitting(args: SftArgs, facts: Facts, gpu: Gpu, gpu_memory_gb: float) -> Iterator[Candidate]:
    """Yield the layouts that fit, each with the least recomputation."""
    architecture, usable = architecture_of(facts.hf_config), usable_bytes(gpu_memory_gb)
    for settled in _layouts(args, facts, gpu):
        for with_recompute in _recomputing(settled, architecture):
            setup = Setup.of(with_recompute, plan_of(with_recompute, facts))
            candidate = Candidate(with_recompute, Step(architecture, setup, gpu, args.global_batch_size))
            if candidate.bytes <= usable:
                yield candidate
                break


def has_layout(args: SftArgs, facts: Facts, gpu: Gpu) -> bool:
    """Return whether the model and the global batch size allow a layout, regardless of memory."""
    return any(True for _ in _layouts(args, facts, gpu))


def _layouts(args: SftArgs, facts: Facts, gpu: Gpu) -> Iterator[SftArgs]:
    """Yield the layouts that the model and the global batch size allow, regardless of memory.

    Sizes set by the user are kept.
    """
    architecture, setup = architecture_of(facts.hf_config), Setup.of(args, plan_of(args, facts))
    num_gpus = facts.world_size
    powers = [1 << exponent for exponent in range(num_gpus.bit_length())]
    context_sizes = expert_sizes = [1]
    if all(attention.takes_parts_of_rows for attention in architecture.attentions):
        context_sizes = powers
    if architecture.has_experts:
        expert_sizes = powers
    choices: dict[str, list[Any]] = {
        # Tensor parallelism is not faster beyond the GPUs of a link.
        "tensor_model_parallel_size": [size for size in powers if size <= gpu.linked],
        "pipeline_model_parallel_size": [size for size in range(1, num_gpus + 1) if num_gpus % size == 0],
        "num_virtual_stages_per_pipeline_rank": [None, *_VIRTUAL_STAGES],
        "context_parallel_size": context_sizes,
        "expert_model_parallel_size": expert_sizes,
        "micro_batch_size": _ROWS,
    }
    for name in choices:
        given = getattr(args, name)
        if given != getattr(_DEFAULTS, name):
            choices[name] = [given]
    for values in itertools.product(*choices.values()):
        settled = _settled(args, architecture.outside.num_layers, dict(zip(choices, values, strict=True)))
        # Several rows split over context-parallel ranks give each rank the tokens of one whole row.
        shares_and_stacks = settled.context_parallel_size > 1 and settled.micro_batch_size > args.micro_batch_size
        if shares_and_stacks or not _divides(settled, num_gpus):
            continue
        if is_possible(layout_of(settled), architecture, setup):
            yield settled


def _settled(args: SftArgs, num_layers: int, values: dict[str, Any]) -> SftArgs:
    """Return the options with `values`, and with the settings that `values` require."""
    pp = values["pipeline_model_parallel_size"]
    values = dict(values, sequence_parallel=values["tensor_model_parallel_size"] > 1)
    stated = (args.pipeline_model_parallel_layout, args.decoder_first_pipeline_num_layers)
    is_free = not any(stated) and args.decoder_last_pipeline_num_layers is None
    if is_free and num_layers % pp:  # fewer layers on the last stage, which has the output layer
        values["decoder_last_pipeline_num_layers"] = num_layers - math.ceil(num_layers / pp) * (pp - 1)
    return dataclasses.replace(args, **values)


def _divides(args: SftArgs, num_gpus: int) -> bool:
    """Return whether the number of GPUs and the global batch size are divisible, and every stage has a layer."""
    layout = layout_of(args)
    last, is_whole = layout.decoder_last_pipeline_num_layers, layout.pipeline_model_parallel_size == 1
    if (last is not None and last < 1) or (is_whole and layout.num_virtual_stages_per_pipeline_rank):
        return False
    if process_problems(layout, num_gpus):
        return False
    if instances_problems(layout, num_gpus, args.num_distributed_optimizer_instances):
        return False
    per_micro_batch = args.micro_batch_size * data_parallel_size(layout, num_gpus)
    number, rest = divmod(args.global_batch_size, per_micro_batch)
    is_interleaved = num_virtual_stages(layout) is not None
    return rest == 0 and not (is_interleaved and number % layout.pipeline_model_parallel_size)


def _recomputing(args: SftArgs, architecture: Architecture) -> list[SftArgs]:
    """Return the options without recomputation, with selective and with full recomputation.

    If the user set recomputation, return only `args`.
    """
    if args.recompute_granularity != "none":
        return [args]
    # Fused attention stores few activations; MLPs store most.
    modules = sorted({module for layer in architecture.layers for module in layer.mlp.recompute_modules[:1]})
    selective = dataclasses.replace(args, recompute_granularity="selective", recompute_modules=modules)
    return [args, selective, dataclasses.replace(args, recompute_granularity="full")]
