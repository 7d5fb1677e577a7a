"""Train drafters of one model for equal minutes on the same rows, and compare their drafts and their speed in vLLM.

    python scripts/bench/drafters.py --model DIR --dataset train.jsonl --val_dataset val.jsonl --output_dir OUT
    python scripts/bench/drafters.py ... --minutes 5 --drafters mtp features eagle3.1 dflash dspark

The minutes include the loading of the model, but neither the export nor the measurements. A first run of a few steps
measures the time of a step, from which the number of steps follows. `--until times` ends there, `--until training`
before the measurements, and the next call continues: only times and speed need an idle machine. Speed is that of one
request at a time, with the number of draft tokens that is the fastest.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

PROBED = 8
"""Number of steps with which the time of a step is measured."""
DRAFTED = 3
"""Number of draft tokens in training; smaller numbers are measured as well."""


def options_of(drafter: str, num_layers: int) -> list[str]:
    """Return the options of `megatron sft` for a drafter.

    Args:
        num_layers: number of decoder layers of the trunk.
    """
    match drafter:
        case "mtp":
            return []
        case "features":
            return ["--mtp_features", *map(str, sorted({num_layers // 2, max(num_layers - 3, 1)}))]
        case "dflash" | "dspark":
            return ["--drafter", drafter, "--drafter_layers", "2"]
    return ["--drafter", drafter]


def run(*words: object) -> float:
    """Run a swiftlite command, and return its seconds."""
    start = time.monotonic()
    command = [sys.executable, "-m", "swiftlite", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.monotonic() - start


def train(args: argparse.Namespace, drafter: str, steps: int, directory: Path) -> float:
    """Train a drafter, and return the seconds of the command."""
    num_layers = json.loads(args.config.read_text())["num_hidden_layers"]
    return run(
        *("megatron", "sft", "--model", args.model, "--dataset", *args.dataset, "--mtp_mode", "heads_only"),
        *("--mtp_loss", "nla", "--mtp_unroll", DRAFTED, "--draft_vocab", args.draft_vocab),
        *("--packing", "true", "--max_length", 1024, "--global_batch_size", 1, "--torch_dtype", args.torch_dtype),
        *("--train_iters", steps, "--lr", args.lr, "--acceptance_samples", 0, "--split_dataset_ratio", 0),
        *options_of(drafter, num_layers),
        *("--output_dir", directory),
    )


def steps_of(args: argparse.Namespace, drafter: str, directory: Path) -> int:
    """Return the number of training steps that take `--minutes` on an idle machine.

    They follow from a run of a few steps; a second call reads its result.
    """
    measured = directory / "steps.json"
    if not measured.exists():
        probe = directory / "probe"
        seconds = train(args, drafter, PROBED, probe)
        rows = map(json.loads, (probe / "metrics.jsonl").read_text().splitlines())
        times = [row["time/step"] for row in rows if "time/step" in row]
        # another program can only make a step longer
        per_step = min(times)
        start = seconds - sum(times)
        steps = max(1, int((60 * args.minutes - start) / per_step))
        measured.write_text(json.dumps({"start": start, "per_step": per_step, "steps": steps}))
    return json.loads(measured.read_text())["steps"]


def make(args: argparse.Namespace, drafter: str, steps: int, directory: Path) -> None:
    """Train and export a drafter, unless an earlier call has."""
    if not (directory / "hf" / "config.json").exists():
        train(args, drafter, steps, directory / "run")
        run("export", "--to_hf", "--model", directory / "run", "--output_dir", directory / "hf")


def measure(args: argparse.Namespace, directory: Path) -> str:
    """Measure an exported drafter; return the columns of the table from its first drafts on."""
    result = directory / "bench" / "bench.json"
    if not result.exists():
        run(
            *("bench", "--model", directory / "hf", "--val_dataset", args.val_dataset, "--infer_backend", "vllm"),
            *("--num_speculative_tokens", *range(DRAFTED + 1), "--concurrency", 1, "--rounds", 1, "--max_prompts", 32),
            *("--max_new_tokens", 64, "--torch_dtype", args.torch_dtype, "--output_dir", directory / "bench"),
        )
    bench = json.loads(result.read_text())
    ratios = {int(number): ratio for number, ratio in bench["recommendations"][0]["ratios"].items()}
    best = max(ratios, key=lambda number: ratios[number])
    of_number = {server["num_speculative_tokens"]: server["measured"][0] for server in bench["servers"][1:]}
    first = of_number[1]["drafts"]["acceptance_rate"]
    lengths = " ".join(f"{of_number[number]['mean_accepted_length']:.2f}" for number in sorted(ratios))
    return f"{first:>14.1%}  {lengths:<18}{best:>5}{ratios[best]:>8.2f}x"


def check_options(args: argparse.Namespace) -> None:
    """Exit if an earlier call with the same directory had other options, because its results would be reused."""
    own = {name: str(value) for name, value in vars(args).items() if name not in ("drafters", "output_dir", "until")}
    stored = args.output_dir / "options.json"
    if not stored.exists():
        args.output_dir.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps(own))
    before = json.loads(stored.read_text())
    if changed := [f"--{name} {before.get(name)}" for name in own if before.get(name) != own[name]]:
        sys.exit(
            f"{args.output_dir} has results with {', '.join(changed)}: give the same options, or another --output_dir"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", nargs="+", required=True)
    parser.add_argument("--val_dataset", required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--drafters", nargs="+", default=["mtp", "features", "eagle3.1", "dflash", "dspark"])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--draft_vocab", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--torch_dtype", default="float32")
    parser.add_argument("--until", choices=["times", "training", "speed"], default="speed")
    args = parser.parse_args()
    check_options(args)
    args.config = Path(args.model) / "config.json"
    if args.until == "speed":
        print("drafter    steps  first drafts  tokens/step: 1 2 3  best   speed", flush=True)
    for drafter in args.drafters:
        directory = args.output_dir / drafter
        steps = steps_of(args, drafter, directory)
        if args.until != "times":
            make(args, drafter, steps, directory)
        if args.until == "speed":
            print(f"{drafter:<10}{steps:>6}{measure(args, directory)}", flush=True)


if __name__ == "__main__":
    main()
