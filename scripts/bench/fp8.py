"""Compare the losses of a training run in FP8 with those of the same run in bfloat16, step by step.

    python scripts/bench/fp8.py --model DIR_OR_GGUF --dataset rows.jsonl

torch computes FP8 and bfloat16 on a CPU as well. Without instructions for bfloat16, a core computes 9 GFLOP/s in
bfloat16 and 26 in FP8 (measured), so 200 steps of SmolLM2-135M with 256 tokens take about 40 minutes per run on two
cores.
"""

import argparse
import statistics
from pathlib import Path

from train import steps_of_swiftlite

LAST = 20
"""Number of last steps whose mean losses are compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", choices=["rowwise", "tensorwise"], default=["rowwise"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--micro_batch_size", type=int, default=1)
    parser.add_argument("--torch_dtype", default="bfloat16", help=argparse.SUPPRESS)
    args = parser.parse_args()
    runs: dict[str, list[float]] = {}
    for recipe in ("bfloat16", *args.recipes):
        options = () if recipe == "bfloat16" else ("--fp8_format", "hybrid", "--fp8_recipe", recipe)
        runs[recipe] = losses = [step["loss"] for step in steps_of_swiftlite(args, 0, ("--lr", 1e-4, *options))]
        mean, of_bfloat16 = (statistics.mean(runs[name][-LAST:]) for name in (recipe, "bfloat16"))
        print(
            f"{recipe:<12} loss of the first step {losses[0]:.4f}, of the last {LAST} {mean:.4f}, "
            f"{mean / of_bfloat16 - 1:+.2%} of bfloat16",
            flush=True,
        )


if __name__ == "__main__":
    main()
