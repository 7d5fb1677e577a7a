"""Memory of `megatron dpo` while its reference model is asked: `doctor --plan --loss_type`. Arithmetic, no torch.

It is asked before the first step, when the model, its gradients' buffers and the optimizer's float32 weights stand
already; moments come with the first step, when the reference model is gone. So a rank needs the larger one of two sums.
"""

import dataclasses
from dataclasses import dataclass

from swiftlite.args.commands import DoctorArgs
from swiftlite.args.fields import RecomputeArgs
from swiftlite.estimate.memory import StageMemory, estimate
from swiftlite.estimate.setup import Setup
from swiftlite.families.family import HfConfig
from swiftlite.families.rank import FLOAT32
from swiftlite.heads import Heads
from swiftlite.plan.layout import ranks_of
from swiftlite.plan.preference import reference_layout


@dataclass(frozen=True)
class AskingMemory:
    """What each of some ranks holds while the reference model is asked, in bytes.

    Attributes:
        first, last: the ranks.
        stage: of the model's pipeline.
        model: its weights, the gradients' buffers, and float32 weights where its own are not.
        reference_stage: of the reference model's pipeline; None on ranks that hold nothing of it.
        reference: its weights.
        layer: the most that one of its layers computes; less, since nothing is kept for a backward pass.
        logits: of one row of the data.
    """

    first: int
    last: int
    stage: int
    model: int
    reference_stage: int | None
    reference: int
    layer: int
    logits: int

    @property
    def total(self) -> int:
        return self.model + self.reference + self.layer + self.logits


def reference_setup(args: DoctorArgs, setup: Setup) -> Setup:
    """How the reference model stands: its own layout, one row of the data at a time, no heads.

    Args:
        setup: the model's.
    """
    layout = reference_layout(args)
    return dataclasses.replace(
        setup,
        layout=layout,
        num_gpus=len(ranks_of(layout, setup.num_gpus)),
        recompute=RecomputeArgs(recompute_granularity="full"),  # so that one layer's share is known
        micro_batch_size=2,  # a pair; with kto an answer, and the same question before another one
        heads=Heads(),
        mtp_mode="joint",
        lora=None,
        low_precision=None,  # it is asked as engines would be
    )


def estimate_asking(
    args: DoctorArgs, setup: Setup, stages: list[StageMemory], reference_config: HfConfig
) -> list[AskingMemory]:
    """What ranks hold while the reference model is asked, by the stages that they compute of both.

    Args:
        setup, stages: of the model, as trained.
        reference_config: the reference model's config.json.
    """
    asked = reference_setup(args, setup)
    reference = estimate(reference_config, asked)
    pairs: dict[tuple[int, int | None], list[int]] = {}
    for rank in range(setup.num_gpus):
        # Ranks of a stage follow each other (megatron-core's order has the pipeline last).
        place = rank * len(stages) // setup.num_gpus
        reference_place = rank * len(reference) // asked.num_gpus if rank < asked.num_gpus else None
        pairs.setdefault((place, reference_place), []).append(rank)
    found = []
    for (place, reference_place), ranks in pairs.items():
        here, there = stages[place], None if reference_place is None else reference[reference_place]
        found.append(
            AskingMemory(
                first=ranks[0],
                last=ranks[-1],
                stage=place,
                model=here.weights + here.gradients + _float32_weights(here, setup),
                reference_stage=reference_place,
                reference=there.weights if there else 0,
                layer=there.recomputed if there else 0,
                logits=there.logits if there else 0,
            )
        )
    return found


def _float32_weights(stage: StageMemory, setup: Setup) -> int:
    """Of the optimizer's state, what is there before the first step: one of the three numbers of a parameter."""
    return stage.optimizer // 3 if setup.parameter_bytes < FLOAT32 else 0
