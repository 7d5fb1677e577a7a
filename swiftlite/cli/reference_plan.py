"""Print `swiftlite doctor --plan --loss_type`: the memory while the reference model is evaluated."""

from swiftlite.args.commands import DoctorArgs
from swiftlite.methods.dpo import WITHOUT_REFERENCE
from swiftlite.plan.cost import memory
from swiftlite.plan.cost.reference_memory import ReferenceMemory, estimate_reference
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.facts import Facts
from swiftlite.report.table import text_table

GB = 1e9
_COLUMNS = ("ranks", "stage", "model", "reference stage", "weights", "a layer", "logits", "total", "in training")


def report_reference(args: DoctorArgs, facts: Facts, setup: Setup, stages: list[memory.StageMemory]) -> bool:
    """Print the memory of ranks before the first step, and return whether it suffices. True without a reference model.

    Args:
        setup, stages: setup and stages of the trained model.
    """
    if args.loss_type is None or args.loss_type in WITHOUT_REFERENCE:
        return True
    config = facts.hf_config
    if args.ref_model:
        _, config = facts.described("ref_model")
    asking = estimate_reference(args, setup, stages, config)
    print("\nGB on one rank before the first step, while the reference model runs; it is freed before training")
    print(text_table([_COLUMNS, *(_row(part, stages) for part in asking)], indent="  ", numbers=True))
    print("  (model: weights, gradients and float32 weights, without the optimizer's moments)")
    usable = memory.usable_bytes(args.gpu_memory_gb or memory.USUAL_GPU_MEMORY_GB)
    most = max(asking, key=lambda part: part.total)
    fits = most.total <= usable
    print(f"\n{memory.verdict(fits)}: {most.total / GB:.1f} GB on {_ranks(most)}, {usable / GB:.1f} GB usable")
    if not fits:
        print("    increase --ref_tensor_model_parallel_size or --ref_pipeline_model_parallel_size")
    return fits


def _ranks(part: ReferenceMemory) -> str:
    if part.first == part.last:
        return f"rank {part.first}"
    return f"ranks {part.first}-{part.last}"


def _row(part: ReferenceMemory, stages: list[memory.StageMemory]) -> tuple[str, ...]:
    sizes = (part.reference, part.layer, part.logits, part.total, stages[part.stage].total)
    reference_stage = "-"
    if part.reference_stage is not None:
        reference_stage = str(part.reference_stage)
    return (
        _ranks(part).split()[1],
        str(part.stage),
        f"{part.model / GB:.2f}",
        reference_stage,
        *(f"{size / GB:.2f}" for size in sizes),
    )
