"""Print `swiftlite doctor --plan --max_completion_length`: memory and FLOPs of the rollouts of `megatron grpo`."""

from swiftlite.args.commands import DoctorArgs
from swiftlite.plan.cost import memory
from swiftlite.plan.cost.rollout_memory import estimate_rollouts, rollout_flops
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.facts import Facts
from swiftlite.report.table import text_table

GB = 1e9
_COLUMNS = ("trainer", "reference", "teacher", "engine", "KV cache", "total")


def report_rollouts(args: DoctorArgs, facts: Facts, setup: Setup, stages: list[memory.StageMemory]) -> bool:
    """Print the memory of the GPU that trainer and engine share, and return whether it suffices. True for a plan
    without rollouts.

    Args:
        setup, stages: setup and stages of the trained model.
    """
    if args.max_completion_length is None:
        return True
    config = facts.hf_config
    reference = facts.described("ref_model")[1] if args.ref_model else config
    teacher = facts.described("teacher_model")[1] if args.teacher_model else None
    shared = estimate_rollouts(args, setup, stages, config, reference, teacher)
    sizes = (shared.trainer, shared.reference, shared.teacher, shared.engine, shared.cache, shared.total)
    print("\nGB on the GPU of the first rank, which the engine shares (megatron grpo)")
    print(text_table([_COLUMNS, tuple(f"{size / GB:.2f}" for size in sizes)], indent="  ", numbers=True))
    print(f"  (KV cache: {args.max_batch_size} sequences of {setup.max_length} tokens)")
    drawn, trained = rollout_flops(config, setup, args.max_completion_length)
    sizes_of_rows = f"{args.max_completion_length} tokens, of a row of {setup.max_length}"
    print(f"  FLOPs for a completion of {sizes_of_rows}: {drawn:.2g} to draw without drafts, {trained:.2g} to train on")
    usable = memory.usable_bytes(args.gpu_memory_gb or memory.USUAL_GPU_MEMORY_GB)
    fits = shared.total <= usable
    print(f"\n{memory.verdict(fits)}: {shared.total / GB:.1f} GB with the engine, {usable / GB:.1f} GB usable")
    if not fits:
        print("    use a smaller --max_batch_size or --max_length, or more GPUs for the trainer")
    return fits
