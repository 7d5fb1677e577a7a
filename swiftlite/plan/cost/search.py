"""Search the parallel layouts of a model on a number of GPUs, fastest first (`doctor --plan --gpu_type`).

`speed.py` estimates the speed. A candidate consists of the user's options, with values for options that are not set, so
that it can be printed as a command line.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from swiftlite.args.commands import DoctorArgs
from swiftlite.args.fields import OptimArgs
from swiftlite.families.architecture import Architecture
from swiftlite.families.family import HfConfig
from swiftlite.families.index import architecture_of
from swiftlite.plan.cost.gpus import Gpu
from swiftlite.plan.cost.memory import largest, usable_bytes
from swiftlite.plan.cost.setup import is_possible, planned_setup
from swiftlite.plan.cost.speed import Step
from swiftlite.plan.layout import (
    data_parallel_size,
    instances_problems,
    layout_of,
    num_virtual_stages,
    process_problems,
)

_ROWS = [1, 2, 4, 8]
"""Micro-batch sizes to try; larger sizes do not make matrix products faster."""
_VIRTUAL_STAGES = [2, 3, 4, 6, 8]
DOUBLINGS = 7
"""Maximum number of times that the number of GPUs is doubled if no layout fits."""
_DEFAULTS = DoctorArgs()


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Options with a complete layout, and the estimated training step with these options."""

    args: DoctorArgs
    step: Step

    @property
    def bytes(self) -> int:
        """Memory of the rank with the largest memory, in bytes."""
        return largest(self.step.memory).total


def global_batch_size(args: DoctorArgs) -> int:
    """Return the global batch size. The default is that of megatron sft."""
    return args.global_batch_size or OptimArgs().global_batch_size


def ranked(args: DoctorArgs, hf_config: HfConfig, gpu: Gpu, gpu_memory_gb: float) -> list[Candidate]:
    """Return the layouts that the model and the global batch size allow and that fit into memory, fastest first."""
    found = list(_fitting(args, hf_config, gpu, gpu_memory_gb))
    return sorted(found, key=lambda candidate: -candidate.step.tokens_per_second)


def larger(args: DoctorArgs, hf_config: HfConfig, gpu: Gpu, gpu_memory_gb: float) -> DoctorArgs | None:
    """Search with 2, 4, ... times the GPUs and the global batch size until a layout fits; return None if none fits."""
    assert args.num_gpus is not None
    for doublings in range(1, DOUBLINGS + 1):
        batch = global_batch_size(args) << doublings
        more = dataclasses.replace(args, num_gpus=args.num_gpus << doublings, global_batch_size=batch)
        if any(True for _ in _fitting(more, hf_config, gpu, gpu_memory_gb)):
            return more
    return None


def _fitting(args: DoctorArgs, hf_config: HfConfig, gpu: Gpu, gpu_memory_gb: float) -> Iterator[Candidate]:
    """Yield the layouts that fit, each with the least recomputation."""
    architecture, usable = architecture_of(hf_config), usable_bytes(gpu_memory_gb)
    for settled in _layouts(args, hf_config, gpu):
        for with_recompute in _recomputing(settled, architecture):
            setup = planned_setup(with_recompute, hf_config)
            candidate = Candidate(with_recompute, Step(architecture, setup, gpu, global_batch_size(args)))
            if candidate.bytes <= usable:
                yield candidate
                break


def has_layout(args: DoctorArgs, hf_config: HfConfig, gpu: Gpu) -> bool:
    """Return whether the model and the global batch size allow a layout, regardless of memory."""
    return any(True for _ in _layouts(args, hf_config, gpu))


def _layouts(args: DoctorArgs, hf_config: HfConfig, gpu: Gpu) -> Iterator[DoctorArgs]:
    """Yield the layouts that the model and the global batch size allow, regardless of memory.

    Sizes set by the user are kept.
    """
    architecture, setup = architecture_of(hf_config), planned_setup(args, hf_config)
    assert args.num_gpus is not None  # checked by rules
    powers = [1 << exponent for exponent in range(args.num_gpus.bit_length())]
    context_sizes = expert_sizes = [1]
    if all(attention.takes_parts_of_rows for attention in architecture.attentions):
        context_sizes = powers
    if architecture.has_experts:
        expert_sizes = powers
    choices: dict[str, list[Any]] = {
        # Tensor parallelism is not faster beyond the GPUs of a link.
        "tensor_model_parallel_size": [size for size in powers if size <= gpu.linked],
        "pipeline_model_parallel_size": [size for size in range(1, args.num_gpus + 1) if args.num_gpus % size == 0],
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
        if shares_and_stacks or not _divides(settled):
            continue
        if is_possible(layout_of(settled), architecture, setup):
            yield settled


def _settled(args: DoctorArgs, num_layers: int, values: dict[str, Any]) -> DoctorArgs:
    """Return the options with `values`, and with the settings that `values` require."""
    pp = values["pipeline_model_parallel_size"]
    values = dict(values, sequence_parallel=values["tensor_model_parallel_size"] > 1)
    stated = (args.pipeline_model_parallel_layout, args.decoder_first_pipeline_num_layers)
    is_free = not any(stated) and args.decoder_last_pipeline_num_layers is None
    if is_free and num_layers % pp:  # fewer layers on the last stage, which has the output layer
        values["decoder_last_pipeline_num_layers"] = num_layers - math.ceil(num_layers / pp) * (pp - 1)
    return dataclasses.replace(args, **values)


def _divides(args: DoctorArgs) -> bool:
    """Return whether the number of GPUs and the global batch size are divisible, and every stage has a layer."""
    assert args.num_gpus is not None
    layout = layout_of(args)
    last, is_whole = layout.decoder_last_pipeline_num_layers, layout.pipeline_model_parallel_size == 1
    if (last is not None and last < 1) or (is_whole and layout.num_virtual_stages_per_pipeline_rank):
        return False
    if process_problems(layout, args.num_gpus):
        return False
    if instances_problems(layout, args.num_gpus, args.num_distributed_optimizer_instances):
        return False
    per_micro_batch = args.micro_batch_size * data_parallel_size(layout, args.num_gpus)
    number, rest = divmod(global_batch_size(args), per_micro_batch)
    is_interleaved = num_virtual_stages(layout) is not None
    return rest == 0 and not (is_interleaved and number % layout.pipeline_model_parallel_size)


def _recomputing(args: DoctorArgs, architecture: Architecture) -> list[DoctorArgs]:
    """Return the options without recomputation, with selective and with full recomputation.

    If the user set recomputation, return only `args`.
    """
    if args.recompute_granularity != "none":
        return [args]
    # Fused attention stores few activations; MLPs store most.
    modules = sorted({layer.mlp.recompute_modules[0] for layer in architecture.layers})
    selective = dataclasses.replace(args, recompute_granularity="selective", recompute_modules=modules)
    return [args, selective, dataclasses.replace(args, recompute_granularity="full")]
