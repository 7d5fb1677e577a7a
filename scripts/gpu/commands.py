"""Run swiftlite commands for stages, and make a small model with a trained head."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from result import Settings

SCRIPTS = Path(__file__).resolve().parents[1]
HEAD = "--mtp_num_layers 1 --mtp_init random --mtp_loss_scaling_factor 0.3".split()
ROWS = "--micro_batch_size 8 --global_batch_size 16 --max_length 256 --lr 2e-3".split()


def start(*words: object, processes: int = 1, log: Path) -> subprocess.Popen:
    """Start `swiftlite WORDS` with `processes` ranks in a separate process group. The output is written to `log`."""
    environment = os.environ | {"NPROC_PER_NODE": str(processes)}
    command = [sys.executable, "-m", "swiftlite", *map(str, words)]
    with log.open("w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)


def swiftlite(*words: object, log: Path) -> str:
    """Run a command to its end, and return its output.

    Raises:
        RuntimeError: the command failed.
    """
    status = start(*words, log=log).wait()
    if status:
        raise RuntimeError(f"swiftlite {words[0]} failed with exit code {status}, see {log}")
    return log.read_text(encoding="utf-8")


def make_model(directory: Path) -> None:
    """Write a qwen3 model with five million random parameters. Every engine supports this model."""
    command = [sys.executable, SCRIPTS / "make_tiny_model.py", "--family", "qwen3", "--output_dir", directory]
    subprocess.run(command, check=True, stdout=sys.stderr)


def make_rows(directory: Path) -> None:
    """Write train.jsonl and val.jsonl from the documentation of the standard library."""
    train, val = directory / "train.jsonl", directory / "val.jsonl"
    command = [sys.executable, SCRIPTS / "make_docstring_dataset.py", "--output", train, "--val_output", val]
    subprocess.run([*command, "--val_rows", "32"], check=True, stdout=sys.stderr)


def sft(settings: Settings, output_dir: Path, *options: object) -> list[object]:
    """Return a training command for the model of `make_model` and the rows of `make_rows`; both are created if
    necessary.
    """
    model, data = settings.work_dir / "small", settings.work_dir / "data"
    if not (model / "config.json").exists():
        make_model(model)
    if not (data / "val.jsonl").exists():
        make_rows(data)
    files = ["--model", model, "--dataset", data / "train.jsonl", "--val_dataset", data / "val.jsonl"]
    words = ["megatron", "sft", *files, "--output_dir", output_dir, "--torch_dtype", "float32", "--report_to", "none"]
    return [*words, *HEAD, *ROWS, *options]


def make_served(settings: Settings) -> tuple[Path, Path]:
    """Return a training run and its export; both are created if necessary."""
    run_dir, hf = settings.work_dir / "served_run", settings.work_dir / "served"
    if not (hf / "config.json").exists():
        shutil.rmtree(run_dir, ignore_errors=True)
        steps = 400
        if settings.tiny:
            steps = 60
        acceptance = ["--acceptance_samples", 32, "--acceptance_max_new_tokens", 48]
        training = sft(settings, run_dir, "--train_iters", steps, *acceptance)
        swiftlite(*training, log=settings.output_dir / "served_sft.log")
        words = ["export", "--to_hf", "--model", run_dir, "--output_dir", hf]
        swiftlite(*words, log=settings.output_dir / "served_export.log")
    return run_dir, hf
