"""Check how a job ends when it is stopped, when a rank is killed or hangs, or when memory is not sufficient."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import torch
from commands import sft, start, swiftlite
from result import Results, Settings
from sparse import make_sparse

STEPS = 12
# The order of additions on a GPU varies, so a resumed run is close to an uninterrupted one, not equal.
BOUND = {"cpu": 0.0, "cuda": 1e-3}
NO_SAMPLES = ("--acceptance_samples", 0)


def run(settings: Settings, results: Results) -> None:
    stop_and_go_on(settings, results)
    repeat(settings, results)
    if settings.device == "cuda" and torch.cuda.device_count() < 2:
        results.add("a killed rank", "requires 2 GPUs")
    else:
        lose_a_rank(settings, results)
        if not settings.tiny:
            wait_for_a_rank(settings, results)
    if settings.device == "cuda":
        ask_for_too_much(settings, results)


def stop_and_go_on(settings: Settings, results: Results) -> None:
    unbroken, stopped = fresh(settings, "unbroken"), fresh(settings, "stopped")
    options = ("--train_iters", STEPS, *NO_SAMPLES)
    swiftlite(*sft(settings, unbroken, *options), log=settings.output_dir / "unbroken.log")
    process = start(*sft(settings, stopped, *options), log=settings.output_dir / "stopped.log")
    wait_for_steps(stopped, 3, process)
    process.send_signal(signal.SIGTERM)
    status = process.wait(300)
    kept = sorted(path.name for path in stopped.glob("checkpoint-*"))
    passed = status == 128 + signal.SIGTERM and len(kept) == 1
    results.add("SIGTERM while training", f"exit code {status}, {' '.join(kept)}", passed, "143, one checkpoint")
    swiftlite(*sft(settings, stopped, *options, "--resume"), log=settings.output_dir / "resumed.log")
    one, other = losses(unbroken), losses(stopped)
    worst = 1.0
    if one.keys() == other.keys():
        worst = max(abs(other[step] - loss) / loss for step, loss in one.items())
    results.at_most("losses of the resumed run, against an uninterrupted one", worst, BOUND[settings.device])


def repeat(settings: Settings, results: Results) -> None:
    """Compare two deterministic runs."""
    options = ("--train_iters", 4, "--deterministic_mode", "true", *NO_SAMPLES)
    found = []
    for name in ("once", "again"):
        swiftlite(*sft(settings, fresh(settings, name), *options), log=settings.output_dir / f"{name}.log")
        found.append(losses(settings.work_dir / name))
    passed = found[0] == found[1] and len(found[0]) == 4
    described = "equal"
    if not passed:
        described = f"{found}"
    results.add("two runs with --deterministic_mode", described, passed, "equal losses")


def lose_a_rank(settings: Settings, results: Results) -> None:
    """Kill a rank with SIGKILL, as the kernel does when memory is exhausted, and check how the job ends."""
    process, ranks = two_ranks(settings, "killed")
    began = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    status = process.wait(300)
    said = (settings.output_dir / "killed.log").read_text()
    passed = status == 128 + signal.SIGKILL and "rank 1 failed first, with signal SIGKILL" in said
    ended = f"exit code {status} after {time.monotonic() - began:.0f} s"
    results.add("a killed rank", ended, passed, "137, with the rank in the error")


def wait_for_a_rank(settings: Settings, results: Results) -> None:
    process, ranks = two_ranks(settings, "hanging", "--distributed_timeout_minutes", 1)
    began = time.monotonic()
    os.kill(ranks[1], signal.SIGSTOP)
    try:
        status = process.wait(300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        status = "none"
    seconds = time.monotonic() - began
    passed = status != "none" and status != 0 and seconds < 180
    results.add("a hanging rank", f"exit code {status} after {seconds:.0f} s", passed, "an end within 180 s")


def ask_for_too_much(settings: Settings, results: Results) -> None:
    """Train the 1.7B shape with 256 rows of 4,096 tokens at once: 4 TB of activations, and few bytes on the host."""
    log, lengths = settings.output_dir / "memory.log", settings.work_dir / "lengths.csv"
    lengths.write_text("4096\n" * 512)
    rows = json.dumps({"mode": "file", "path": str(lengths)})
    words = ["megatron", "sft", "--model", make_sparse(settings, "1.7B"), "--sft_mock_dataset_config_json", rows]
    words += ["--output_dir", fresh(settings, "memory"), "--report_to", "none", "--mtp_num_layers", 0]
    words += ["--micro_batch_size", 256, "--global_batch_size", 256, "--max_length", 4096, "--train_iters", 1]
    status = start(*words, *NO_SAMPLES, log=log).wait(600)
    said = log.read_text()
    passed = status == 1 and "out of memory" in said and "Traceback" not in said
    results.add("out of memory", f"exit code {status}", passed, "1, and a one-line error")


def two_ranks(settings: Settings, name: str, *options: object) -> tuple[subprocess.Popen, list[int]]:
    """Start a job with two ranks, wait for a few steps, and return the job and the process ids of its ranks."""
    out = fresh(settings, name)
    words = sft(settings, out, "--train_iters", 10_000, *NO_SAMPLES, *options)
    process = start(*words, processes=2, log=settings.output_dir / f"{name}.log")
    wait_for_steps(out, 3, process)
    return process, ranks_of(process.pid)


def ranks_of(launcher: int) -> list[int]:
    """Return the launcher's child processes that have RANK in their environment, sorted by RANK."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        for variable in environment:
            if variable.startswith(b"RANK="):
                found[int(variable.removeprefix(b"RANK="))] = int(child)
    return [found[rank] for rank in sorted(found)]


def wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen) -> None:
    """Wait until a run has completed `steps` steps.

    Raises:
        RuntimeError: the process ended before.
    """
    while len(losses(run_dir)) < steps:
        if process.poll() is not None:
            raise RuntimeError(f"{run_dir.name} ended before step {steps} with exit code {process.returncode}")
        time.sleep(0.2)


def losses(run_dir: Path) -> dict[int, float]:
    """Return the losses by step; empty before the first step."""
    file = run_dir / "metrics.jsonl"
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def fresh(settings: Settings, name: str) -> Path:
    directory = settings.work_dir / name
    shutil.rmtree(directory, ignore_errors=True)
    return directory
