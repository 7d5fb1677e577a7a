"""Estimate the memory of frozen models next to the trained one: the reference model of `megatron dpo` (`doctor --plan
--loss_type`) and `grpo`, the teacher of `megatron gkd` and `grpo` (`--teacher_model`), and the reward models of `grpo`.

This module does not import torch.

A teacher, reward models and the reference model of grpo stay in memory. Their activations are freed before the step of
the trained model, and the final hidden states of a teacher (gkd) are in the memory of the host, so only their weights
are added to a rank.

The reference model of dpo is evaluated before the first step, when the trained model, its gradient buffers and the
optimizer's float32 weights are already allocated. The optimizer's moments are allocated in the first step, after the
reference model has been freed. A rank therefore needs the larger of two sums: one includes the reference model, the
other the moments.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swiftlite.args.commands import DpoArgs, GkdArgs, GrpoArgs
from swiftlite.args.fields import ParallelLayout, RecomputeArgs
from swiftlite.base.heads import Heads
from swiftlite.families.family import HfConfig
from swiftlite.families.index import architecture_of
from swiftlite.plan.cost.memory import StageMemory, estimate
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.distillation import teacher_layout
from swiftlite.plan.facts import read_hf_config
from swiftlite.plan.layout import layout_problems, process_problems, ranks_of
from swiftlite.plan.policy import reward_layout, reward_models_on_ranks
from swiftlite.plan.preference import reference_layout


@dataclass(frozen=True)
class FrozenPart:
    """The bytes of a part of a frozen model on a rank; 0 on ranks without a part.

    Attributes:
        weights: its weights.
        layer: peak memory of one layer. This is an upper bound, because nothing is saved for a backward pass.
        logits: logits of two sequences: of a pair, or with kto of an answer and its companion.
    """

    weights: int = 0
    layer: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.layer + self.logits


def frozen_parts(
    setup: Setup,
    layout: ParallelLayout,
    config: HfConfig,
    size: Callable[[FrozenPart], int] = lambda part: part.total,
) -> list[FrozenPart]:
    """Return, for each pipeline stage of the trained model, the part of a frozen model on a rank of this stage. If its
    ranks have different parts, it is the largest of these.

    Args:
        setup: setup of the trained model.
        layout, config: layout and config.json of the frozen model.
        size: bytes by which parts are compared.

    Raises:
        ValueError: the model does not support the layout, or there are too few ranks for it.
    """
    num_ranks = len(ranks_of(layout, setup.num_gpus))
    # A layout string is that of the trained model, whose heads it places.
    num_heads = setup.heads.layers if layout.pipeline_model_parallel_layout else 0
    problems = [*process_problems(layout, num_ranks), *layout_problems(layout, architecture_of(config), num_heads)]
    if problems:  # of a layout that is only tried; the rules have checked that of the run
        raise ValueError(problems[0][0])
    frozen = dataclasses.replace(
        setup,
        layout=layout,
        num_gpus=num_ranks,
        recompute=RecomputeArgs(recompute_granularity="full"),  # so that one layer is counted
        micro_batch_size=2,
        heads=Heads(),
        mtp_mode="joint",
        lora=None,
        low_precision=None,  # evaluated as in engines
    )
    parts = [FrozenPart(stage.weights, stage.recomputed, stage.logits) for stage in estimate(config, frozen)]
    largest = [FrozenPart()] * setup.layout.pipeline_model_parallel_size
    for rank in range(num_ranks):
        # Ranks of a stage are consecutive, because pipeline is the last dimension in megatron-core's order.
        place = rank * len(largest) // setup.num_gpus
        part = parts[rank * len(parts) // num_ranks]
        largest[place] = max(largest[place], part, key=size)
    return largest


def frozen_weights(setup: Setup, layout: ParallelLayout, config: HfConfig) -> list[int]:
    """Return the bytes of weights of `frozen_parts`, the most on a rank of each stage."""
    parts = frozen_parts(setup, layout, config, lambda part: part.weights)
    return [part.weights for part in parts]


def reference_parts(args: DpoArgs, setup: Setup, config: HfConfig) -> list[FrozenPart]:
    """Return the parts of the reference model of `megatron dpo`, as `frozen_parts`."""
    return frozen_parts(setup, reference_layout(args), config)


def before_first_step(stage: StageMemory) -> int:
    """Return the bytes of the trained model while the reference model of dpo is evaluated."""
    return stage.weights + stage.gradients + stage.main_weights


def teacher_weights(args: GkdArgs | GrpoArgs, setup: Setup, teacher_config: HfConfig) -> list[int]:
    """Return the bytes of the teacher's weights, as `frozen_weights`."""
    return frozen_weights(setup, teacher_layout(args, architecture_of(teacher_config)), teacher_config)


def reward_configs(args: GrpoArgs) -> list[HfConfig]:
    """Return config.json of each reward model on the ranks of the run."""
    return [read_hf_config(Path(directory).expanduser()) for directory in reward_models_on_ranks(args)]


def bytes_of_reward_process(args: GrpoArgs) -> int:
    """Return the bytes of the reward models that the process of the reward functions loads, in the dtypes of their
    files, on the GPU of the first rank (`rewards/classifier.py`).
    """
    if args.rollouts_from or reward_models_on_ranks(args):
        return 0
    size = 0
    for directory in args.reward_model:
        size += sum(file.stat().st_size for file in Path(directory).expanduser().glob("*.safetensors"))
    return size


def reward_weights(args: GrpoArgs, setup: Setup, configs: Sequence[HfConfig]) -> list[int]:
    """Return the bytes of the weights of the reward models on the ranks, as `frozen_weights`.

    Args:
        configs: config.json of each of them.
    """
    parts = [frozen_weights(setup, reward_layout(args, architecture_of(config)), config) for config in configs]
    return list(map(sum, zip(*parts, strict=True)))
