"""Estimate the memory of `megatron dpo` while the reference model is evaluated (`doctor --plan --loss_type`).

The reference model is evaluated before the first step, when the trained model, its gradient buffers and the optimizer's
float32 weights are already allocated. The optimizer's moments are allocated in the first step, after the reference
model has been freed. A rank therefore needs the larger of two sums: one includes the reference model, the other the
moments. This module does not import torch.
"""

import dataclasses
from dataclasses import dataclass

from swiftlite.args.commands import DpoArgs
from swiftlite.args.fields import RecomputeArgs
from swiftlite.base.heads import Heads
from swiftlite.families.family import HfConfig
from swiftlite.plan.cost.memory import StageMemory, estimate
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.layout import ranks_of
from swiftlite.plan.preference import reference_layout


@dataclass(frozen=True)
class ReferenceMemory:
    """The memory of a range of ranks while the reference model is evaluated, in bytes.

    Attributes:
        first, last: the first and the last rank of the range.
        stage: stage in the trained model's pipeline.
        model: weights and gradient buffers of the trained model, and float32 main weights unless the model is float32.
        reference_stage: stage in the reference model's pipeline; None on ranks without a part of the reference model.
        reference: weights of the reference model.
        layer: peak memory of one layer of the reference model. This is an upper bound, because nothing is saved for a
            backward pass.
        logits: logits of one row.
    """

    first: int
    last: int
    stage: int
    model: int
    reference_stage: int | None = None
    reference: int = 0
    layer: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return self.model + self.reference + self.layer + self.logits


def reference_setup(args: DpoArgs, setup: Setup) -> Setup:
    """Return the setup of the reference model: its layout, one row at a time, and no heads.

    Args:
        setup: setup of the trained model.
    """
    layout = reference_layout(args)
    return dataclasses.replace(
        setup,
        layout=layout,
        num_gpus=len(ranks_of(layout, setup.num_gpus)),
        recompute=RecomputeArgs(recompute_granularity="full"),  # so that one layer is counted
        micro_batch_size=2,  # a pair, or with kto an answer and its companion
        heads=Heads(),
        mtp_mode="joint",
        lora=None,
        low_precision=None,  # evaluated as in engines
    )


def estimate_reference(
    args: DpoArgs, setup: Setup, stages: list[StageMemory], reference_config: HfConfig
) -> list[ReferenceMemory]:
    """Return the memory while the reference model is evaluated, by groups of ranks.

    The ranks of a group have the same stages of both models.

    Args:
        setup, stages: setup and stages of the trained model.
        reference_config: the reference model's config.json.
    """
    asked = reference_setup(args, setup)
    reference = estimate(reference_config, asked)
    pairs: dict[tuple[int, int | None], list[int]] = {}
    for rank in range(setup.num_gpus):
        # Ranks of a stage are consecutive, because pipeline is the last dimension in megatron-core's order.
        place = rank * len(stages) // setup.num_gpus
        reference_place = None
        if rank < asked.num_gpus:
            reference_place = rank * len(reference) // asked.num_gpus
        pairs.setdefault((place, reference_place), []).append(rank)
    found = []
    for (place, reference_place), ranks in pairs.items():
        here = stages[place]
        memory = ReferenceMemory(
            first=ranks[0],
            last=ranks[-1],
            stage=place,
            model=here.weights + here.gradients + here.main_weights,
        )
        if reference_place is not None:
            there = reference[reference_place]
            memory = dataclasses.replace(
                memory,
                reference_stage=reference_place,
                reference=there.weights,
                layer=there.recomputed,
                logits=there.logits,
            )
        found.append(memory)
    return found
