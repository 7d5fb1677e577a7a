"""Print `swiftlite doctor --plan` without --model: which sizes of Qwen3 can be trained on one GPU."""

import dataclasses
from typing import Any

from swiftlite.args.commands import SftArgs
from swiftlite.plan.cost.memory import RESERVE, estimate, largest, usable_bytes
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.cost.streamed_memory import estimate_streamed
from swiftlite.plan.facts import Facts
from swiftlite.plan.kernels import PLANNED_MACHINE
from swiftlite.plan.run import plan_of
from swiftlite.report.table import text_table

GB = 1e9
GPU_SIZES = (24, 80, 141)
"""Memory in GB of an RTX 4090 or L4, of an A100 or H100, and of an H200."""


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
    }


QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "8B": _qwen3(4096, 12288, 36, 32),
    "14B": _qwen3(5120, 17408, 40, 40),
    "32B": _qwen3(5120, 25600, 64, 64),
}
"""The settings in config.json of the published dense Qwen3 models that determine their memory."""
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"tuner_type": "lora"},
    "heads_only": {"mtp_mode": "heads_only"},
    "heads_only, --stream_trunk": {"mtp_mode": "heads_only", "stream_trunk": True},
}
"""The kinds of runs, with the options that they add to those of the command."""


def sizes(args: SftArgs) -> dict[str, dict[str, int]]:
    """Return the bytes of a run on one GPU, by model and kind of run."""
    found: dict[str, dict[str, int]] = {}
    for model, hf_config in QWEN3.items():
        found[model] = {}
        facts = Facts(1, hf_config, machine=PLANNED_MACHINE)
        for kind, options in KINDS.items():
            run = dataclasses.replace(args, **options)
            plan = plan_of(run, facts)
            setup = Setup.of(run, plan)
            if plan.trunk.holds_layers:
                found[model][kind] = largest(estimate(hf_config, setup)).total
            else:
                found[model][kind] = estimate_streamed(hf_config, setup).peak
    return found


def report_sizes(args: SftArgs) -> None:
    """Print the table of all models and kinds of runs."""
    rows = [("Qwen3", *KINDS)]
    for model, by_kind in sizes(args).items():
        rows.append((model, *map(_cell, by_kind.values())))
    print(
        f"Qwen3 on one GPU; micro-batches of {args.micro_batch_size} x {args.max_length} tokens, "
        f"{args.torch_dtype}, --optimizer {args.optimizer}, recompute {args.recompute_granularity}"
    )
    gpus = ", ".join(map(str, GPU_SIZES))
    print(f"GB (1e9 bytes), and in parentheses the smallest of GPUs with {gpus} GB on which the run fits\n")
    print(text_table(rows, indent="  ", numbers=True))
    print(f"\n{RESERVE:.0%} of a GPU is reserved for CUDA, NCCL and fragmentation; --model plans another model")


def _cell(num_bytes: int) -> str:
    fitting = [size for size in GPU_SIZES if num_bytes <= usable_bytes(size)]
    smallest = "none"
    if fitting:
        smallest = str(fitting[0])
    return f"{num_bytes / GB:.1f} ({smallest})"
