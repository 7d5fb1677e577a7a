"""Plan `megatron gkd`: the layout of the teacher, and the steps that train on completions. This module does not import
torch."""

import random

from swiftlite.args.commands import GkdArgs, GrpoArgs
from swiftlite.args.fields import ParallelLayout
from swiftlite.families.architecture import Architecture
from swiftlite.plan.layout import layout_beside


def teacher_layout(args: GkdArgs | GrpoArgs, architecture: Architecture | None) -> ParallelLayout:
    """Return the layout of the teacher: that of the trained model with the sizes of the --teacher_... options.

    Args:
        architecture: that of the teacher, if known.
    """
    sizes = args.teacher_tensor_model_parallel_size, args.teacher_pipeline_model_parallel_size
    return layout_beside(args, *sizes, architecture)


def is_on_policy(args: GkdArgs, step: int) -> bool:
    """Return whether a step (counted from 0) trains on completions of the model.

    The result depends only on the options and the step, so that a resumed run makes the same choices on all ranks.
    """
    return random.Random(f"{args.seed}/{step}").random() < args.lmbda


def on_policy_steps(args: GkdArgs, num_steps: int) -> list[int]:
    """Return the steps of a run that train on completions."""
    return [step for step in range(num_steps) if is_on_policy(args, step)]
