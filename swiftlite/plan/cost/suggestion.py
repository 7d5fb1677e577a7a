"""Find the most similar setup that fits into memory."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from swiftlite.args.fields import ParallelLayout, RecomputeArgs
from swiftlite.families.architecture import Architecture
from swiftlite.families.family import HfConfig
from swiftlite.plan.cost.memory import estimate_of, largest, usable_bytes
from swiftlite.plan.cost.setup import Setup, is_possible, planned_architecture
from swiftlite.plan.layout import instances_problems, process_problems

LARGEST_DOUBLING = 10
"""Maximum number of times that the number of GPUs is doubled."""


def suggest(
    hf_config: HfConfig, setup: Setup, gpu_memory_gb: float, others_fit: Callable[[Setup], bool] = lambda setup: True
) -> Setup | None:
    """Return the most similar setup that fits, with 2, 4, ... times the GPUs if necessary; None without one.

    Changes are tried in this order: sharding the optimizer state, recomputation, then more ranks per model, first
    without and then with recomputation.

    Args:
        others_fit: whether the models next to the trained one also fit in a setup, in which a training step fits.
    """
    architecture = planned_architecture(hf_config, setup)
    for doublings in range(LARGEST_DOUBLING + 1):
        num_gpus = setup.num_gpus << doublings
        for candidate in _candidates(architecture, dataclasses.replace(setup, num_gpus=num_gpus)):
            step = largest(estimate_of(architecture, candidate)).total
            if step <= usable_bytes(gpu_memory_gb) and others_fit(candidate):
                return candidate
    return None


def _candidates(architecture: Architecture, setup: Setup) -> Iterator[Setup]:
    """Yield the setups that the model allows on the GPUs of `setup`, fastest first."""
    recomputes = [setup.recompute]
    if setup.recompute.recompute_granularity != "full":
        recomputes.append(RecomputeArgs(recompute_granularity="full"))
    for tp, ep, pp in _candidate_sizes(architecture, setup):
        layout = _resized(setup.layout, tp, ep, pp)
        if not is_possible(layout, architecture, setup) or process_problems(layout, setup.num_gpus):
            continue
        if instances_problems(layout, setup.num_gpus, setup.num_distributed_optimizer_instances):
            continue
        shares = setup.use_distributed_optimizer or setup.num_gpus > tp * pp  # needs several replicas
        for recompute in recomputes:
            yield dataclasses.replace(setup, layout=layout, recompute=recompute, use_distributed_optimizer=shares)


def _candidate_sizes(architecture: Architecture, setup: Setup) -> list[tuple[int, int, int]]:
    """Return (tensor-, expert-, pipeline-parallel) sizes that are not smaller than the sizes of `setup`."""
    layout = setup.layout
    powers = [1 << exponent for exponent in range(setup.num_gpus.bit_length())]
    most_tp = max(8, layout.tensor_model_parallel_size)  # the GPUs of one machine
    most_pp = min(setup.num_gpus, architecture.outside.num_layers)
    expert_sizes = [1]
    if architecture.has_experts:
        expert_sizes = [size for size in powers if size >= layout.expert_model_parallel_size]
    sizes = itertools.product(
        [size for size in powers if layout.tensor_model_parallel_size <= size <= most_tp],
        expert_sizes,
        range(layout.pipeline_model_parallel_size, most_pp + 1),
    )
    # Fewer ranks per model leave more for data parallelism; a pipeline also has a bubble.
    return sorted(sizes, key=lambda size: (math.prod(size) * size[2], size[2]))


def _resized(layout: ParallelLayout, tp: int, ep: int, pp: int) -> ParallelLayout:
    if pp != layout.pipeline_model_parallel_size:
        layout = dataclasses.replace(  # other options for stages do not apply
            layout,
            pipeline_model_parallel_layout=None,
            num_virtual_stages_per_pipeline_rank=None,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
        )
    return dataclasses.replace(
        layout,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_model_parallel_size=ep,
        pipeline_model_parallel_size=pp,
    )
