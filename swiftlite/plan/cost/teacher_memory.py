"""Estimate the memory of frozen models next to the trained one: the teacher of `megatron gkd` or `megatron grpo`
(`doctor --plan --teacher_model`), and the reference model and the reward models of `megatron grpo`.

This module does not import torch.

Their activations are freed before the step of the trained model, and the final hidden states of a teacher (gkd) are in
the memory of the host, so only their weights are added to the memory of a rank.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from swiftlite.args.commands import GkdArgs, GrpoArgs
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.heads import Heads
from swiftlite.families.family import HfConfig
from swiftlite.families.index import architecture_of
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.distillation import teacher_layout
from swiftlite.plan.facts import read_hf_config
from swiftlite.plan.layout import ranks_of
from swiftlite.plan.policy import reward_layout, reward_models_on_ranks


def teacher_weights(args: GkdArgs | GrpoArgs, setup: Setup, teacher_config: HfConfig) -> list[int]:
    """Return the bytes of the teacher's weights, as `frozen_weights`."""
    return frozen_weights(setup, teacher_layout(args, architecture_of(teacher_config)), teacher_config)


def reward_configs(args: GrpoArgs) -> list[HfConfig]:
    """Return config.json of each reward model on the ranks of the run."""
    return [read_hf_config(Path(directory).expanduser()) for directory in reward_models_on_ranks(args)]


def reward_weights(args: GrpoArgs, setup: Setup, configs: Sequence[HfConfig]) -> list[int]:
    """Return the bytes of the weights of all reward models, as `frozen_weights`.

    Args:
        configs: config.json of each of them.
    """
    parts = [frozen_weights(setup, reward_layout(args, architecture_of(config)), config) for config in configs]
    return list(map(sum, zip(*parts, strict=True)))


def frozen_weights(setup: Setup, layout: ParallelLayout, config: HfConfig) -> list[int]:
    """Return, for each pipeline stage of the trained model, the bytes of a frozen model's weights on a rank of this
    stage. If its ranks have different stages of the frozen model, it is the largest of these.

    Args:
        setup: setup of the trained model.
        layout, config: layout and config.json of the frozen model.
    """
    num_ranks = len(ranks_of(layout, setup.num_gpus))
    frozen = dataclasses.replace(setup, layout=layout, num_gpus=num_ranks, heads=Heads(), lora=None, low_precision=None)
    weights = [stage.weights for stage in estimate(config, frozen)]
    most = [0] * setup.layout.pipeline_model_parallel_size
    for rank in range(num_ranks):
        # Ranks of a stage are consecutive, because pipeline is the last dimension in megatron-core's order.
        place = rank * len(most) // setup.num_gpus
        most[place] = max(most[place], weights[rank * len(weights) // num_ranks])
    return most
