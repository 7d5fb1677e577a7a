"""Print `swiftlite doctor --plan --gpu_type`: layouts by estimated speed, details of the fastest layout, and its
options.
"""

from operator import itemgetter

from swiftlite.args.command_line import typed
from swiftlite.args.commands import PlanArgs, SftArgs
from swiftlite.args.docs import options
from swiftlite.base.errors import UserError
from swiftlite.families.family import HfConfig
from swiftlite.plan.cost import memory, timing
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.cost.gpus import GPUS, Gpu
from swiftlite.plan.cost.search import DOUBLINGS, Candidate, has_layout, larger, ranked
from swiftlite.plan.facts import Facts
from swiftlite.report.table import text_table
from swiftlite.rules.common import changed

GB = 1e9
_SHOWN = 6
"""Number of layouts shown: the fastest for each combination of parallel sizes."""
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "experts": "expert_model_parallel_size",
}
_WORDS = {
    "products": "matrix products of layers: {products:.0%} of {peak} in tiles that fill the GPU",
    "attention": "attention scores and values: {attention:.0%} of the peak",
    "elementwise": "norms, activations, sums: {hbm:.0%} of {memory:.2f} TB/s",
    "vocabulary": "output layer and loss of trunk and heads",
    "recompute": "recomputed forward passes",
    "tensor_parallel": "exposed gathers and reductions: {efficiency:.0%} of {link:.0f} GB/s",
    "context_parallel": "exchange of keys and values",
    "expert_parallel": "all-to-all of tokens and experts",
    "launches": "the GPU waits for kernel launches",
    "pipeline": "pipeline bubble and exchange of states",
    "data_parallel": "exposed reductions of gradients and gathers of weights",
    "optimizer": "AdamW and the gradient norm",
    "idle": "the GPU waits for the host between steps",
}


def report_layouts(args: PlanArgs, run: SftArgs, facts: Facts) -> bool:
    """Print the layouts; return whether any layout fits into memory.

    Args:
        run: options of the planned run.
    """
    assert args.gpu_type is not None
    hf_config, gpu = facts.hf_config, GPUS[args.gpu_type]
    gpu_memory_gb = args.gpu_memory_gb or gpu.memory_gb
    found = ranked(run, facts, gpu, gpu_memory_gb)
    if not found:
        print(_nothing_fits(args, run, facts, gpu_memory_gb))
        return False
    shown = _different(found)
    batch = f"{run.global_batch_size} rows of {run.max_length} tokens"
    print(f"{run.model}\nESTIMATED, not measured: steps of {batch} on {_gpus(args)}; {len(found)} layouts fit\n")
    rows = [_row(candidate, hf_config, gpu) for candidate in shown]
    print(text_table([("tokens/s", "MFU", "GB", *_SIZES, "data", "micro-batches", "recompute"), *rows], indent="  "))
    heading = "share of the step time"
    if len(shown) > 1:
        heading += ", in the same order"
    print(f"\n{heading}")
    print(text_table(_splits(shown), indent="  ", numbers=True))
    step = shown[0].step
    print(f"\nfirst layout: {step.tokens_per_step} tokens in {step.seconds.total:.3f} s")
    print(text_table(_arithmetic(shown[0], gpu), indent="  "))
    print(f"\n  swiftlite megatron sft {typed('model', run.model)} ... {_flags(shown[0].args)}")
    return True


def _gpus(args: PlanArgs) -> str:
    return f"{args.num_gpus} x {args.gpu_type}"


def _different(found: list[Candidate]) -> list[Candidate]:
    """Return the first layout for each combination of parallel sizes."""
    firsts: dict[tuple[int, ...], Candidate] = {}
    for candidate in found:
        firsts.setdefault(tuple(getattr(candidate.args, name) for name in _SIZES.values()), candidate)
    return list(firsts.values())[:_SHOWN]


def _row(candidate: Candidate, hf_config: HfConfig, gpu: Gpu) -> tuple[str, ...]:
    args, step = candidate.args, candidate.step
    stages = str(args.pipeline_model_parallel_size)
    if args.num_virtual_stages_per_pipeline_rank:
        stages += f" x {args.num_virtual_stages_per_pipeline_rank}"
    recompute = args.recompute_granularity
    if recompute == "selective":
        recompute = ", ".join(args.recompute_modules)
    sizes = {name: str(getattr(args, option)) for name, option in _SIZES.items()} | {"pipeline": stages}
    return (
        f"{step.tokens_per_second:,.0f}",
        f"{_mfu(candidate, hf_config, gpu):.1%}",
        f"{candidate.bytes / GB:.1f}",
        *sizes.values(),
        str(step.replicas),
        f"{step.num_micro_batches:g} of {args.micro_batch_size}",
        recompute,
    )


def _mfu(candidate: Candidate, hf_config: HfConfig, gpu: Gpu) -> float:
    """Return the MFU: required FLOPs divided by the FLOPs at peak speed. It is computed like the MFU in a run's log."""
    step, setup = candidate.step, candidate.step.setup
    flops = training_flops(
        hf_config,
        setup.heads,
        heads_only=setup.mtp_mode == "heads_only",
        lora=setup.lora,
        indexer_mode=setup.indexer_mode,
    )
    tokens = step.tokens_per_step
    outside = tokens // setup.max_length * flops.outside_windows(setup.max_length)
    useful = flops.step(tokens, tokens * setup.max_length, [tokens] * len(flops.targets), outside_windows=outside)
    return useful / (step.seconds.total * setup.num_gpus * gpu.peak_flops)


def _splits(shown: list[Candidate]) -> list[tuple[str, ...]]:
    """Return the breakdown of step times in percent, without columns that are zero for all layouts."""
    parts = [vars(candidate.step.seconds) for candidate in shown]
    names = [name for name in parts[0] if any(map(itemgetter(name), parts))]
    header = tuple(name.replace("_", " ") for name in names)
    totals = [candidate.step.seconds.total for candidate in shown]
    rows = [tuple(f"{part[name] / total:.1%}" for name in names) for part, total in zip(parts, totals, strict=True)]
    return [header, *rows]


def _arithmetic(candidate: Candidate, gpu: Gpu) -> list[tuple[str, ...]]:
    """Return the seconds of each part of a step, with a description."""
    step = candidate.step
    numbers = {
        "products": step.software.products_on(gpu),
        "peak": _peak(candidate, gpu),
        "attention": step.software.attention_on(gpu, step.setup.has_flash2),
        "hbm": timing.HBM_EFFICIENCY,
        "memory": gpu.hbm / 1e12,
        "link": gpu.link / GB,
        "efficiency": timing.LINK_EFFICIENCY,
    }
    lines = []
    for name, seconds in vars(step.seconds).items():
        if seconds:
            lines.append((name.replace("_", " "), f"{seconds:.3f} s", _WORDS[name].format(**numbers)))
    return lines


def _peak(candidate: Candidate, gpu: Gpu) -> str:
    """Return the peak speed of bfloat16 and of the low precision."""
    peak, low = gpu.peak_flops / 1e12, candidate.step.setup.low_precision
    text = f"{peak:.0f} TFLOP/s"
    if low is None:
        return text
    name = "FP8"
    if low.is_fp4:
        name = "FP4"
    return f"{text}, {low.speedup * peak:.0f} in {name},"


def _flags(args: SftArgs) -> str:
    """Return the options of megatron sft for this layout."""
    names = [name for name in changed(args, options(SftArgs)) if name not in ("model", "global_batch_size")]
    flags = [typed(name, getattr(args, name)) for name in names]
    return " ".join([*flags, f"--global_batch_size {args.global_batch_size}"])


def _nothing_fits(args: PlanArgs, run: SftArgs, facts: Facts, gpu_memory_gb: float) -> str:
    """Return a text with the number of GPUs that the run requires.

    Raises:
        UserError: no layout of these GPUs can divide the batch evenly.
    """
    gpu = GPUS[str(args.gpu_type)]
    if not has_layout(run, facts, gpu):
        raise UserError(
            f"--global_batch_size {run.global_batch_size} is not divisible in any layout of {_gpus(args)}",
            f"use a multiple of {args.num_gpus}, or set fewer sizes of the layout",
        )
    usable = memory.usable_bytes(gpu_memory_gb) / GB
    words = f"does not fit: every layout of {_gpus(args)} requires more than {usable:.1f} GB per GPU"
    more = larger(run, facts, gpu, gpu_memory_gb)
    if more is None:
        most = f"{1 << DOUBLINGS} times the number of GPUs"
        return f"{words}, even with {most}\n    use a smaller --max_length, or set fewer sizes of the layout"
    num_gpus, batch = more
    return f"{words}\n    use --num_gpus {num_gpus} --global_batch_size {batch}"
