"""Run the stages, each in a separate process group with a time limit; `scripts/gpu.sh` shows the usage.

Results are appended to gpu_results.jsonl; the page gpu_report.md is rewritten after each stage. The exit code is 1 if
anything failed.
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

# Default order of the stages.
STAGES = {
    "machine": "versions, chosen kernels, the speed of a product and of a copy",
    "kernels": "fused kernels against float64",
    "logits": "logits of tiny models against transformers in float32",
    "kinds": "every kind of training run against the same run on the CPU",
    "layouts": "parallel layouts against one process, then tests/gpu",
    "training": "MFU of training, operations that take most of a step, operations that wait",
    "speed": "training speed by shape and kind of run, against a plain transformers loop on the same device",
    "plan": "memory estimated by `doctor --plan` against live tensors",
    "faults": "SIGTERM and --resume, deterministic runs, a killed rank, a hanging rank, too little memory",
    "engines": "a model with a head, trained, exported and served by every installed engine",
    "quantized": "that model quantized, served by vLLM and compared with its decoded weights",
    "live": "new weights into a running vLLM",
    "drafts": "the speedup of drafts in vLLM by shape, draft tokens, acceptance and requests, with random weights",
}
NEEDS_ITS_TURN = ("speed", "drafts")
"""Stages that run only if --stages selects them, because they take too long."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu.sh", description=__doc__)
    parser.add_argument(
        "--stages", nargs="+", choices=STAGES, metavar="STAGE", help=f"stages to run, of {', '.join(STAGES)}"
    )
    parser.add_argument("--minutes", type=float, default=20, help="time limit of a stage in minutes (default: 20)")
    parser.add_argument(
        "--total_minutes", type=float, help="time limit of all stages together in minutes (default: none)"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to check that the stages run")
    parser.add_argument("--model", type=Path, help="Hugging Face directory to train (default: random weights)")
    parser.add_argument(
        "--sizes", nargs="+", default=["0.6B", "1.7B"], help="model sizes of the stage training (default: 0.6B 1.7B)"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="NAME",
        help="families of logits, kinds, cases of speed and drafts, formats to run (default: all)",
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("out/gpu"), help="directory of results and logs (default: out/gpu)"
    )
    parser.add_argument("--work_dir", type=Path, help="directory of models and runs (default: work in --output_dir)")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.output_dir = args.output_dir.resolve()
    args.work_dir = (args.work_dir or args.output_dir / "work").resolve()
    if args.stage:
        run_one(args)
        return 0
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is used
    for directory in (args.output_dir, args.work_dir):
        directory.mkdir(parents=True, exist_ok=True)
    (args.output_dir / FILE).write_text("")
    ends_at = float("inf")
    if args.total_minutes:
        ends_at = time.monotonic() + 60 * args.total_minutes
    for stage in args.stages or [stage for stage in STAGES if stage not in NEEDS_ITS_TURN]:
        run_stage(stage, args, ends_at)
        (args.output_dir / "gpu_report.md").write_text(page(read(args.output_dir)), encoding="utf-8")
    print("\n" + page(read(args.output_dir)))
    return int(any(result.passed is False for result in read(args.output_dir)))


def run_one(args: argparse.Namespace) -> None:
    """Run a stage, or one case of it, in this process."""
    settings = Settings(
        args.device, args.tiny, args.model, args.output_dir, args.work_dir, tuple(args.sizes), args.cases
    )
    # In a package, because other code looks for a module named `kernels`.
    module = importlib.import_module(f"stages.{args.stage}")
    results = Results(args.output_dir, args.stage)
    if args.case:
        module.run_case(args.case, settings, results)
    else:
        module.run(settings, results)


def run_stage(stage: str, args: argparse.Namespace, ends_at: float) -> None:
    """Run a stage in a separate process group, and add to its results how the process ended."""
    results, log = Results(args.output_dir, stage), args.output_dir / f"{stage}.log"
    left = (ends_at - time.monotonic()) / 60
    minutes = min(args.minutes, left)
    if minutes <= 0:
        results.add("ended", "not started: the time limit --total_minutes was reached", False, "runs")
        return
    print(f"{stage:9} started, limit {minutes:.1f} minutes: {STAGES[stage]}", flush=True)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent), *sys.argv[1:], "--stage", stage]
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, start_new_session=True)
        try:
            status = process.wait(60 * minutes)
            ended = f"exit code {status}, see {log}"
        except subprocess.TimeoutExpired:
            status, ended = 1, f"stopped at the limit of {minutes:.3g} minutes, see {log}"
        finally:
            kill(process)
    if status == 0:
        ended = f"{time.monotonic() - start:.0f} s"
    results.add("ended", ended, not status, "exit code 0")


def kill(process: subprocess.Popen) -> None:
    """Kill a stage and all its child processes, which would slow down the next stage."""
    with contextlib.suppress(psutil.NoSuchProcess):
        stage = psutil.Process(process.pid)
        for each in (*stage.children(recursive=True), stage):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
