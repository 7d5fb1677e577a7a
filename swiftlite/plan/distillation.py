"""Plan `megatron gkd`: the layout of the teacher, and the steps that train on completions. This module does not import
torch."""

import random

from swiftlite.args.commands import GkdArgs
from swiftlite.args.fields import ParallelLayout
from swiftlite.families.architecture import Architecture


def teacher_layout(args: ParallelLayout, architecture: Architecture | None) -> ParallelLayout:
    """Return the layout of the teacher: that of the trained model, with equal stages.

    Its last stage is on the ranks of the last stage of the trained model, where both predictions meet.

    Args:
        args: layout of the trained model.
        architecture: that of the teacher. A teacher without experts has no expert parallelism.
    """
    has_experts = architecture is None or architecture.has_experts
    return ParallelLayout(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size if has_experts else 1,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size if has_experts else 1,
    )


def is_on_policy(args: GkdArgs, step: int) -> bool:
    """Return whether a step (counted from 0) trains on completions of the model.

    The result depends only on the options and the step, so that a resumed run makes the same choices on all ranks.
    """
    return random.Random(f"{args.seed}/{step}").random() < args.lmbda


def on_policy_steps(args: GkdArgs, num_steps: int) -> list[int]:
    """Return the steps of a run that train on completions."""
    return [step for step in range(num_steps) if is_on_policy(args, step)]
