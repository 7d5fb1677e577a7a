"""Estimate the memory of a rank in training for `doctor --plan`, from config.json and options.

This module does not import torch. Parameters, gradients and optimizer state are exact, except for the padding of the
distributed optimizer's buffers (a few kilobytes); small tensors, whose moments stay float32 with `--optimizer
adamw_8bit`, are counted as if they had 8 bits. Activations are the tensors that autograd saves in swiftlite's model
(`swiftlite/model`), listed by module as `saved_tensors_hooks` reports them. `scripts/bench/memory.py` measures all of
these. Activations of fused kernels were read from the sources of torch and megatron-core, because torch has no fused
norm on a CPU.

`stage_memory.py` estimates one forward pass of a virtual stage; this module counts how many passes are in flight. The
CUDA context, NCCL's buffers, fragmentation (see `RESERVE`) and one layer's gradients in the backward pass are not
counted. With adapters, activations are counted as if every weight were trained. The estimate is then too large, because
a frozen norm saves less. Activations of DoRA are counted (`plan/cost/adapters.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from swiftlite.families.architecture import Architecture
from swiftlite.families.family import HfConfig
from swiftlite.families.rank import FLOAT32, ParameterCount
from swiftlite.plan.cost.setup import (
    HOST_BYTES,
    Setup,
    gradient_bytes,
    held_by_stages,
    main_weight_bytes,
    moment_bytes,
    planned_architecture,
)
from swiftlite.plan.cost.stage_memory import ModelOnRank, VirtualStage, share
from swiftlite.plan.layout import ranks_with_same_parameters

# Share of a GPU's memory reserved for the CUDA context, NCCL's buffers and fragmentation.
RESERVE = 0.08
USUAL_GPU_MEMORY_GB = 80.0


@dataclass(frozen=True)
class StageMemory:
    """The memory of one rank of a pipeline stage, in bytes.

    Only `parameters` and `trained` are numbers of parameters.
    """

    holds: str
    """The virtual stages of the rank, as in a layout string: "E t*4" or "t*2 | t*2 m L"."""
    parameters: int
    trained: ParameterCount
    weights: int
    gradients: int
    optimizer: int
    main_weights: int
    """Bytes of the float32 main weights, a part of `optimizer`."""
    offloaded: int
    """Bytes of moments that are in the memory of the host, and not a part of `optimizer`."""
    host: int
    """Bytes of the host's memory that these moments, and copies of their weights and gradients, use per rank."""
    float32_gradients: int
    """Bytes of the float32 copies of bfloat16 gradients, which exist while the optimizer updates the weights. There are
    no activations at that time."""
    activations: int
    """Bytes of the activations of all micro-batches in flight at the peak, without logits."""
    in_flight: int
    """Number of forward passes of virtual stages in flight at the peak."""
    recomputed: int
    """Peak bytes of the activations that one backward pass recomputes."""
    quantized: int
    """Bytes of low-precision copies of weights."""
    logits: int
    """Bytes of the logits that the losses of trunk and heads store, plus the largest temporary copy."""

    @property
    def state(self) -> int:
        """Bytes that stay between steps."""
        return self.weights + self.quantized + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + max(self.activations + self.recomputed + self.logits, self.float32_gradients)


def estimate(hf_config: HfConfig, setup: Setup) -> list[StageMemory]:
    """Estimate the memory of a rank on each pipeline stage. The layout must be valid (`plan/layout.py`).

    Args:
        hf_config: config.json.

    Raises:
        UserError: the model_type is unknown.
    """
    return estimate_of(planned_architecture(hf_config, setup), setup)


def estimate_of(architecture: Architecture, setup: Setup) -> list[StageMemory]:
    """Estimate the memory of a rank on each pipeline stage like `estimate`, but from an architecture."""
    model = ModelOnRank(architecture, setup)
    virtual_stages, first_layer = [], 0
    for holds in held_by_stages(setup, architecture.outside.num_layers):
        virtual_stages.append(VirtualStage(model, holds, first_layer))
        first_layer += holds.count("t")
    pp = setup.layout.pipeline_model_parallel_size
    return [_stage_memory(model, virtual_stages[rank::pp], rank) for rank in range(pp)]


def _stage_memory(model: "ModelOnRank", virtual_stages: Sequence["VirtualStage"], rank: int) -> StageMemory:
    """Return the memory of one rank of pipeline stage `rank`, which computes these virtual stages."""
    setup, pp = model.setup, model.setup.layout.pipeline_model_parallel_size
    parameters = sum((stage.parameters() for stage in virtual_stages), ParameterCount())
    trained = sum((stage.trained_parameters() for stage in virtual_stages), ParameterCount())
    on_rank = _sharded(trained, setup)
    moments, offloaded = int(on_rank * moment_bytes(setup)), int(on_rank * setup.offload_fraction)
    on_host = int(offloaded * moment_bytes(setup))
    main_weights = on_rank * main_weight_bytes(setup)
    passes = [stage.forward_pass() for stage in virtual_stages]
    waiting = _most_waiting([each.activation_bytes + each.logits for each in passes], rank, pp)
    logits = _bytes_in_flight(waiting, [each.logits for each in passes])
    return StageMemory(
        holds=" | ".join(stage.describe() for stage in virtual_stages),
        parameters=parameters.total,
        trained=trained,
        weights=parameters.total * setup.parameter_bytes,
        gradients=trained.total * gradient_bytes(setup),
        optimizer=main_weights + moments - on_host,
        main_weights=main_weights,
        offloaded=on_host,
        host=offloaded * HOST_BYTES,
        float32_gradients=on_rank * FLOAT32 * setup.grad_reduce_in_bf16,
        activations=_bytes_in_flight(waiting, [each.activation_bytes for each in passes]),
        in_flight=sum(waiting),
        recomputed=max(each.recomputed for each in passes),
        quantized=sum(stage.quantized_weights() for stage in virtual_stages),
        logits=logits + max(each.passing_logits for each in passes),
    )


def _sharded(trained: ParameterCount, setup: Setup) -> int:
    """Return the number of parameters that the optimizer of a rank updates.

    A distributed optimizer shards them over data-parallel and context-parallel ranks. If it has several instances, each
    shards them over a part of these ranks.
    """
    if not setup.use_distributed_optimizer:
        return trained.total
    dense_ranks, expert_ranks = ranks_with_same_parameters(setup.layout, setup.num_gpus)
    instances = setup.num_distributed_optimizer_instances
    return share(trained.dense, dense_ranks // instances) + share(trained.expert, expert_ranks // instances)


def _most_waiting(sizes: Sequence[int], rank: int, pp: int) -> list[int]:
    """Count the forward passes of each virtual stage that are in flight when their activations have the most bytes.

    The schedules are those of megatron-core. In 1F1B, stage `rank` of `pp` runs pp - rank forward passes before its
    first backward pass. In the interleaved schedule, micro-batches pass in groups of `pp` through the virtual stages in
    order, and in the opposite order in the backward pass. After the warm-up, each forward pass is followed by a
    backward pass. The result is an upper bound for steps with few micro-batches.

    For example, the first of 2 ranks with 2 virtual stages, A and B, warms up with 2 * (2 - 0 - 1) + (2 - 1) * 2 = 4
    passes:

        forward    A  A  B  B  A  A  B  B
        backward               B  B  A  A
        waiting A  1  2  2  2  3  4  4  3      counted before the backward pass of the same column
        waiting B  0  0  1  2  2  1  1  2

    At most five passes are in flight: 3 of A and 2 of B, or 4 of A and 1 of B. The second case has more bytes if A
    stores more than B.

    Args:
        sizes: bytes that one forward pass of each virtual stage stores.
    """
    virtual = len(sizes)
    if virtual == 1:
        return [pp - rank]
    warmup = 2 * (pp - rank - 1) + (virtual - 1) * pp
    waiting, most = [0] * virtual, [0] * virtual
    for step in range(warmup + 2 * pp * virtual):
        forward = step // pp % virtual
        waiting[forward] += 1
        if _bytes_in_flight(waiting, sizes) > _bytes_in_flight(most, sizes):
            most = list(waiting)
        if step >= warmup:
            backward = virtual - 1 - (step - warmup) // pp % virtual
            waiting[backward] -= 1
    return most


def _bytes_in_flight(waiting: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(number * size for number, size in zip(waiting, sizes, strict=True))


def usable_bytes(gpu_memory_gb: float) -> int:
    """Return the part of a GPU's memory that a run can use."""
    return int(gpu_memory_gb * 1e9 * (1 - RESERVE))


def largest(memory: Sequence[StageMemory]) -> StageMemory:
    """Return the stage with the largest memory."""
    return max(memory, key=lambda stage: stage.total)
