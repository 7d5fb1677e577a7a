"""Write the parity table, which compares every parallel layout and every kind of recomputation with one process.

    python scripts/parity.py                                       # 7 families, gloo on this machine
    python scripts/parity.py --families qwen3 --cases PP2 CP2 --depth 2 --tied
    python scripts/parity.py --device cuda --dtype bfloat16        # on one GPU: recomputation
    python scripts/parity.py --transformer_impl transformer_engine # its layers against torch's in one process

For each cell of the table, the same tiny model is trained for 5 steps on the same rows. Compared with one process are
the losses of trunk and MTP at each step, the gradient norms of the first and the last step, each gradient of the first
step, and each weight after the last step. The cell shows the largest relative difference, divided by the difference
that float32 rounding can cause (`bounds_of` in tests/parallel/parity.py). A value below 1 is thus explained by
rounding. In the directory out/parity, or --output_dir, parity.json has all numbers and parity.md the table.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ["llama", "qwen3", "mimo", "qwen3_moe", "glm4_moe", "deepseek_v3", "hy_v3", "qwen3_next"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--cases", nargs="+", help="names of cases (default: all that the device can run)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--depth", type=int, default=1, help="MTP layers")
    parser.add_argument("--packed", action="store_true", help="pack several sequences in a row")
    parser.add_argument("--transformer_impl", choices=["local", "transformer_engine"], default="local")
    parser.add_argument("--tied", action="store_true", help="tie the output layer to the embedding")
    parser.add_argument("--output_dir", type=Path, default=Path("out/parity"), help="[out/parity]")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return, by family and case, the differences by name, or the reason why the case cannot run."""
    import torch
    from safetensors.torch import load_file

    from swiftlite.plan.kernels import Kernels
    from tests import te_stand_ins
    from tests.kinds import ONE_PROCESS
    from tests.parallel import parity
    from tests.parallel.launch import launch

    kernels, launcher = Kernels(), launch
    names = args.cases or [name for name in parity.CASES if name != ONE_PROCESS]
    if args.transformer_impl == "transformer_engine":
        kernels = Kernels("transformer_engine", is_fused=True, has_grouped_experts=True)
        names = args.cases or list(parity.CASES)
        if args.device == "cpu":
            launcher = te_stand_ins.launch
    table: dict[str, dict[str, Any]] = {family: {} for family in args.families}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        models = {family: parity.make_model(root / family, family, args.depth, args.tied) for family in args.families}
        options: dict[str, Any] = {"torch_dtype": args.dtype}
        if args.packed:
            options |= {"padding_free": True, "micro_batch_size": 2}
        base = [parity.Job(hf_dir, root / family / "alone", options) for family, hf_dir in models.items()]
        alone = dict(zip(models, parity.run(1, base), strict=True))
        jobs: dict[int, dict[tuple[str, str], parity.Job]] = {}
        for family, hf_dir in models.items():
            for name in names:
                case = parity.CASES[name]
                job = parity.Job(hf_dir, root / family / name, options | case.options, kernels=kernels)
                if args.device == "cuda" and case.num_processes > torch.cuda.device_count():
                    table[family][name] = f"requires {case.num_processes} GPUs"
                elif reason := parity.refusal(job, case.num_processes):
                    table[family][name] = reason
                else:
                    jobs.setdefault(case.num_processes, {})[family, name] = job
        for num_processes, chosen in jobs.items():
            start = time.perf_counter()
            results = dict(zip(chosen, parity.run(num_processes, list(chosen.values()), launcher), strict=True))
            seconds = time.perf_counter() - start
            print(f"{len(chosen)} runs of {num_processes} processes: {seconds:.0f} s", file=sys.stderr)
            for (family, name), result in results.items():
                source = load_file(models[family] / "model.safetensors")
                table[family][name] = parity.compare(alone[family], result, source)
    return {family: {name: row[name] for name in names} for family, row in table.items()}


def render(table: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with a row per case and a column per family. Footnotes explain cells without values."""
    from tests.parallel.parity import BOUNDS, bounds_of

    footnotes: list[str] = []

    def cell(family: str, value: dict[str, float] | str) -> str:
        if isinstance(value, str):
            if value not in footnotes:
                footnotes.append(value)
            return f"[{footnotes.index(value) + 1}]"
        bounds = bounds_of(family)
        name = max(value, key=lambda name: value[name] / bounds[name])
        if not value[name]:
            return "0"
        return f"{value[name] / bounds[name]:.2f} ({name} {value[name]:.0e})"

    families = list(table)
    lines = ["| | " + " | ".join(families) + " |", "|---" * (1 + len(families)) + "|"]
    for case in table[families[0]]:
        lines.append(f"| {case} | " + " | ".join(cell(family, table[family][case]) for family in families) + " |")
    lines += ["", "Bounds: " + ", ".join(f"{name} {bound:.0e}" for name, bound in BOUNDS.items()), ""]
    worst = {
        name: max((v[name] for row in table.values() for v in row.values() if not isinstance(v, str)), default=0.0)
        for name in BOUNDS
    }
    lines += ["Worst: " + ", ".join(f"{name} {value:.0e}" for name, value in worst.items()), ""]
    lines += [f"{number}. {reason}" for number, reason in enumerate(footnotes, start=1)]
    return "\n".join(lines)


def problems(table: dict[str, dict[str, Any]], is_exact: bool) -> list[str]:
    """Return the cells above their bounds. With `is_exact`, recomputation must give no difference."""
    from tests.parallel.parity import BOUNDS, CASES, bounds_of

    found = []
    for family, row in table.items():
        for case, cell in row.items():
            if isinstance(cell, str):
                continue
            bounds = bounds_of(family)
            if is_exact and CASES[case].num_processes == 1:
                bounds = dict.fromkeys(BOUNDS, 0.0)
            found += [f"{family}, {case}: {name} {cell[name]:.1e}" for name in cell if not cell[name] <= bounds[name]]
    return found


def main() -> int:
    args = parse()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share this machine's cores
    sys.path.insert(0, str(ROOT))
    table = measure(args)
    text = render(table)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    described = {"device": args.device, "dtype": args.dtype, "depth": args.depth, "tied": args.tied}
    described |= {"packed": args.packed, "transformer_impl": args.transformer_impl, "cells": table}
    (args.output_dir / "parity.json").write_text(json.dumps(described, indent=2) + "\n")
    (args.output_dir / "parity.md").write_text(text + "\n")
    print(text)
    # bfloat16 has no bounds. The order of additions in GPU kernels may vary.
    is_exact = args.device == "cpu" and args.transformer_impl == "local"
    found: list[str] = []
    if args.dtype == "float32":
        found = problems(table, is_exact)
    for line in found:
        print(f"exceeds rounding: {line}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
