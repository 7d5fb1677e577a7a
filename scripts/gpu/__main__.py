"""Run the stages, each in a process of its own with a time limit; `scripts/gpu.sh` says how.

Results lie in gpu_results.jsonl and on one page, gpu_report.md. Exits with 1 where anything failed.
"""

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

from result import FILE, Results, Settings, page, read

STAGES = ("machine", "kernels", "logits", "layouts", "training", "plan", "faults", "engines", "live")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu.sh", description=__doc__)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--minutes", type=float, default=20, help="longest time of one stage (default: 20)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: whether it runs, not how fast")
    parser.add_argument("--model", type=Path, help="Hugging Face directory to train (default: random weights)")
    parser.add_argument("--output_dir", type=Path, default=Path("out/gpu"))
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.output_dir = args.output_dir.resolve()
    if args.stage:
        settings = Settings(args.device, args.tiny, args.model, args.output_dir)
        # A package of their own: `kernels` alone is a name that others look for.
        importlib.import_module(f"stages.{args.stage}").run(settings, Results(args.output_dir, args.stage))
        return 0
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any stage asks torch
    args.output_dir.mkdir(parents=True, exist_ok=True)
    (args.output_dir / FILE).write_text("")
    for stage in args.stages:
        run_stage(stage, args)
    text = page(read(args.output_dir))
    (args.output_dir / "gpu_report.md").write_text(text, encoding="utf-8")
    print("\n" + text)
    return int(any(result.passed is False for result in read(args.output_dir)))


def run_stage(stage: str, args: argparse.Namespace) -> None:
    """Its results are in the file already; what is added is how it ended."""
    log = args.output_dir / f"{stage}.log"
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent), *sys.argv[1:], "--stage", stage]
    start = time.monotonic()
    with log.open("w") as file:
        try:
            status = subprocess.run(command, stderr=file, timeout=60 * args.minutes).returncode
            ended = f"exit status {status}, see {log}"
        except subprocess.TimeoutExpired:
            status, ended = 1, f"cut off after {args.minutes:g} minutes, see {log}"
    seconds = f"{time.monotonic() - start:.0f} s"
    Results(args.output_dir, stage).add("ended", ended if status else seconds, not status)


if __name__ == "__main__":
    sys.exit(main())
