"""Estimate the memory of the teacher of `megatron gkd` or `megatron grpo` (`doctor --plan --teacher_model`).

This module does not import torch.

The teacher's activations are freed before the step of the trained model, and its final hidden states (gkd) are in the
memory of the host, so only its weights are added to the memory of a rank.
"""

import dataclasses

from swiftlite.base.heads import Heads
from swiftlite.families.family import HfConfig
from swiftlite.families.index import architecture_of
from swiftlite.plan.cost.memory import estimate
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.distillation import teacher_layout


def teacher_weights(setup: Setup, teacher_config: HfConfig) -> list[int]:
    """Return the bytes of the teacher's weights on a rank of each pipeline stage.

    Args:
        setup: setup of the trained model.
        teacher_config: config.json of the teacher.
    """
    layout = teacher_layout(setup.layout, architecture_of(teacher_config))
    frozen = dataclasses.replace(setup, layout=layout, heads=Heads(), lora=None, low_precision=None)
    return [stage.weights for stage in estimate(teacher_config, frozen)]
