"""Update the weights of a running vLLM with examples/live_weights.py, and check that new heads raise the acceptance.

Weights are transferred as files, and on GPUs also from GPU to GPU."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from commands import make_served
from result import Results, Settings

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "live_weights.py"


def run(settings: Settings, results: Results) -> None:
    if find_spec("vllm") is None:
        results.add("vllm", "not installed")
        return
    _, hf = make_served(settings)
    on_this_machine = {"file": ""}  # transport of the weights -> devices of the engine
    if settings.device == "cuda":
        on_this_machine["ipc"] = ""
    if torch.cuda.device_count() > 1:
        on_this_machine["nccl"] = "1"
    for transport, devices in on_this_machine.items():
        train_beside(transport, devices, hf, settings, results)


def train_beside(transport: str, devices: str, hf: Path, settings: Settings, results: Results) -> None:
    steps, every = 200, 50
    if settings.tiny:
        steps, every = 40, 20
    data, out = settings.work_dir / "data" / "train.jsonl", settings.work_dir / "live_run"
    shutil.rmtree(out, ignore_errors=True)
    told = {"MODEL": str(hf), "DATASET": str(data), "OUT": str(out), "EVERY": str(every)}
    told |= {"WEIGHT_TRANSPORT": transport, "ENGINE_DEVICES": devices}
    command = [sys.executable, EXAMPLE, "--train_iters", str(steps), "--report_to", "none"]
    log = settings.output_dir / f"live_{transport}.log"
    with log.open("w") as file:  # readable if the stage is stopped
        done = subprocess.run(command, env=os.environ | told, stdout=file)
    said = log.read_text(encoding="utf-8")
    shares = [float(share) for share in re.findall(r"step +\d+: +([\d.]+) % of drafts accepted", said)]
    shown = ", ".join(f"{share:g} %" for share in shares)
    passed = done.returncode == 0 and len(shares) == 1 + steps // every and shares[-1] > shares[0]
    results.add(f"drafts accepted during training, weights by {transport}", shown, passed, "higher at the end")
