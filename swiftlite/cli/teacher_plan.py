"""Print `swiftlite doctor --plan --teacher_model`: the memory of the trainer in `megatron gkd` or `megatron grpo`."""

from swiftlite.args.commands import DoctorArgs
from swiftlite.plan.cost import memory
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.cost.teacher_memory import teacher_weights
from swiftlite.plan.facts import Facts
from swiftlite.report.table import text_table

GB = 1e9
_COLUMNS = ("stage", "model", "teacher", "total")


def report_teacher(args: DoctorArgs, facts: Facts, setup: Setup, stages: list[memory.StageMemory]) -> bool:
    """Print the memory of ranks with the teacher, and return whether it suffices. True without a teacher.

    Args:
        setup, stages: setup and stages of the trained model.
    """
    if args.teacher_model is None:
        return True
    _, config = facts.described("teacher_model")
    rows, totals = [], []
    for number, (stage, teacher) in enumerate(zip(stages, teacher_weights(setup, config), strict=True)):
        totals.append(stage.total + teacher)
        sizes = (stage.total, teacher, totals[-1])
        rows.append((str(number), *(f"{size / GB:.2f}" for size in sizes)))
    command = "grpo" if args.max_completion_length else "gkd"
    print(f"\nGB on one rank with the teacher, whose weights stay in memory (megatron {command})")
    print(text_table([_COLUMNS, *rows], indent="  ", numbers=True))
    usable = memory.usable_bytes(args.gpu_memory_gb or memory.USUAL_GPU_MEMORY_GB)
    fits = max(totals) <= usable
    print(f"\n{memory.verdict(fits)}: {max(totals) / GB:.1f} GB with the teacher, {usable / GB:.1f} GB usable")
    if not fits:
        print("    increase --tensor_model_parallel_size or --pipeline_model_parallel_size")
    return fits
