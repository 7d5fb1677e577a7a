"""Speed and MFU of training on one GPU, what its time goes to, and how often a step waits for the GPU."""

import importlib.util
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from result import Results, Settings
from torch.profiler import ProfilerActivity

from swiftlite.args.commands import SftArgs
from swiftlite.train import phases, sft

SCRIPTS = Path(__file__).resolve().parents[2]
WANTED_MFU = 0.40
LENGTHS = {"mode": "distribution", "type": "lognormal", "lognormal_sigma": 1.1}


def run(settings: Settings, results: Results) -> None:
    """With the kernels that `auto` stands for; and with Transformer Engine's, and in FP8, where there are such."""
    model = settings.model or make_model(settings)
    speed = train(settings, results, model)
    if settings.device == "cuda" and importlib.util.find_spec("transformer_engine"):
        options: dict[str, Any] = {"transformer_impl": "transformer_engine"}
        results.add("Transformer Engine: tokens/s, as a ratio", train(settings, None, model, **options) / speed)
        if torch.cuda.get_device_capability() >= (9, 0):
            options["fp8_format"] = "hybrid"
            results.add("FP8: tokens/s, as a ratio", train(settings, None, model, **options) / speed)


def train(settings: Settings, results: Results | None, model: Path, **options: Any) -> float:
    """Tokens per second; with `results` all that is measured is reported."""
    length, steps = (64, 4) if settings.tiny else (4096, 12)
    lengths = LENGTHS | {"min_seq_len": length // 4, "max_seq_len": length, "mean_seq_len": length // 2}
    args = SftArgs(
        model=str(model),
        sft_mock_dataset_config_json=lengths,
        output_dir=str(settings.output_dir / "run"),
        padding_free=True,
        max_length=length,
        micro_batch_size=2,
        global_batch_size=2 if settings.tiny else 8,
        train_iters=steps,
        acceptance_samples=0,
        report_to=[],
        **options,
    )
    with phases.open_session(args) as mesh:
        prepared = sft.prepare(args, mesh)
        trainer = sft.make_trainer(prepared, phases.restore(prepared))
        with mesh.active():
            measured = [trainer.step(step) for step in range(1, steps)][steps // 4 :]
            activities = [ProfilerActivity.CUDA] if mesh.device.is_cuda else []
            with torch.profiler.profile(activities=[ProfilerActivity.CPU, *activities]) as profile:
                trainer.step(steps)
        trainer.close()
        is_cuda = mesh.device.is_cuda
    middle = {name: statistics.median(metrics[name] for metrics in measured) for name in measured[0]}
    if results:
        report(middle, results)
        describe(profile, is_cuda, results)
    return middle["tokens_per_second"]


def report(middle: dict[str, float], results: Results) -> None:
    """Medians over the steps."""
    results.add("loss", middle["loss"])
    results.add("tokens/s", middle["tokens_per_second"])
    results.add("peak memory, GB", middle["peak_memory_gb"])
    if "mfu" in middle:
        results.add("MFU", middle["mfu"], middle["mfu"] >= WANTED_MFU, f"at least {WANTED_MFU}")


def make_model(settings: Settings) -> Path:
    """A qwen3 with one head and random weights: some 0.5B parameters, or a tiny one."""
    directory = settings.output_dir / "model"
    sizes = ["--hidden_size", "128", "--num_layers", "2", "--vocab_size", "384"]
    if not settings.tiny:
        sizes = ["--hidden_size", "1024", "--num_layers", "28", "--vocab_size", "32768"]
    command = [sys.executable, SCRIPTS / "make_tiny_model.py", "--output_dir", directory, *sizes]
    subprocess.run([*command, "--mtp_num_layers", "1"], check=True, stdout=sys.stderr)
    return directory


def describe(profile: Any, is_cuda: bool, results: Results) -> None:
    """The operations that take most of a step, and those that wait."""
    events = profile.key_averages()
    time_of = (lambda event: event.self_device_time_total) if is_cuda else (lambda event: event.self_cpu_time_total)
    total = sum(time_of(event) for event in events)
    for event in sorted(events, key=time_of, reverse=True)[:8]:
        results.add(f"part of a step: {event.key[:60]}", f"{time_of(event) / total:.1%}, {event.count} calls")
    waits = ("aten::_local_scalar_dense", "aten::nonzero", "cudaStreamSynchronize", "cudaDeviceSynchronize")
    for event in events:
        if event.key in waits:
            results.add(f"waits in a step: {event.key}", event.count)
