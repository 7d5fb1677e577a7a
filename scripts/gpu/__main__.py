"""Run the stages, each in a process group of its own with a time limit; `scripts/gpu.sh` says how.

Each stage says what it does and ends in a line. The results are in gpu_results.jsonl and, rewritten after each stage,
on one page, gpu_report.md. Exits with 1 if anything failed.
"""

import argparse
import contextlib
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from result import FILE, Results, Settings, page, read

# In this order unless --stages names another.
STAGES = {
    "machine": "versions, chosen kernels, the speed of a product and of a copy",
    "kernels": "fused kernels against float64",
    "logits": "logits of tiny models against transformers in float32",
    "layouts": "parallel layouts against one process, then tests/gpu",
    "training": "MFU of training, operations that take most of a step, operations that wait",
    "speed": "training speed by shape and kind of run, against a plain transformers loop on the same device",
    "plan": "memory estimated by `doctor --plan` against live tensors",
    "faults": "SIGTERM and --resume, deterministic runs, a killed rank, a hanging rank, too little memory",
    "engines": "a model with a head, trained, exported and served by every installed engine",
    "live": "new weights into a running vLLM",
}
NEEDS_ITS_TURN = ("speed",)
"""Stages that run only when --stages names them: they take more than their share of an hour."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu.sh", description=__doc__)
    parser.add_argument("--stages", nargs="+", choices=STAGES, metavar="STAGE", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--minutes", type=float, default=20, help="longest time of one stage (default: 20)")
    parser.add_argument("--total_minutes", type=float, help="longest time of all stages together (default: no limit)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: whether it runs, not how fast")
    parser.add_argument("--model", type=Path, help="Hugging Face directory to train (default: random weights)")
    parser.add_argument("--sizes", nargs="+", default=["0.6B", "1.7B"], help="shapes of stage training")
    parser.add_argument("--output_dir", type=Path, default=Path("out/gpu"), help="results and logs")
    parser.add_argument("--work_dir", type=Path, help="models and runs (default: work in --output_dir)")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.output_dir = args.output_dir.resolve()
    args.work_dir = (args.work_dir or args.output_dir / "work").resolve()
    if args.stage:
        run_one(args)
        return 0
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any stage asks torch
    for directory in (args.output_dir, args.work_dir):
        directory.mkdir(parents=True, exist_ok=True)
    (args.output_dir / FILE).write_text("")
    ends_at = time.monotonic() + 60 * args.total_minutes if args.total_minutes else float("inf")
    for stage in args.stages or [stage for stage in STAGES if stage not in NEEDS_ITS_TURN]:
        run_stage(stage, args, ends_at)
        (args.output_dir / "gpu_report.md").write_text(page(read(args.output_dir)), encoding="utf-8")
    print("\n" + page(read(args.output_dir)))
    return int(any(result.passed is False for result in read(args.output_dir)))


def run_one(args: argparse.Namespace) -> None:
    """Run a stage in this process, or one case of it."""
    settings = Settings(args.device, args.tiny, args.model, args.output_dir, args.work_dir, tuple(args.sizes))
    # A package of their own: `kernels` alone is a name that others look for.
    module = importlib.import_module(f"stages.{args.stage}")
    results = Results(args.output_dir, args.stage)
    if args.case:
        module.run_case(args.case, settings, results)
    else:
        module.run(settings, results)


def run_stage(stage: str, args: argparse.Namespace, ends_at: float) -> None:
    """Run a stage in a process group of its own. Its results are in the file already; how it ended is added."""
    results, log = Results(args.output_dir, stage), args.output_dir / f"{stage}.log"
    left = (ends_at - time.monotonic()) / 60
    minutes = min(args.minutes, left)
    if minutes <= 0:
        results.add("ended", "not started: --total_minutes are over", False, "runs")
        return
    print(f"{stage:9} begins, at most {minutes:.1f} minutes: {STAGES[stage]}", flush=True)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent), *sys.argv[1:], "--stage", stage]
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, start_new_session=True)
        try:
            status = process.wait(60 * minutes)
            ended = f"exit status {status}, see {log}"
        except subprocess.TimeoutExpired:
            status, ended = 1, f"cut off after {minutes:.3g} minutes, see {log}"
        finally:
            kill(process)
    seconds = f"{time.monotonic() - start:.0f} s"
    results.add("ended", ended if status else seconds, not status, "exit status 0")


def kill(process: subprocess.Popen) -> None:
    """End a stage and all that it started: what is left behind would take memory and time from the next."""
    with contextlib.suppress(psutil.NoSuchProcess):
        stage = psutil.Process(process.pid)
        for each in (*stage.children(recursive=True), stage):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
