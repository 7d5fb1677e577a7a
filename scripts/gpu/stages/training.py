"""Profile a training step on one GPU: tokens/s compared with the plan's estimate, the slowest kernels, and waits of the
host.

The stage `speed` measures other kinds of runs, and other training loops.
"""

import importlib.util
import json
from typing import Any

import torch
from result import Results, Settings
from trainees import free_memory, medians, profiled, random_rows, shape, slowest, trainee, waits

from swiftlite.args.commands import SftArgs
from swiftlite.base.heads import Heads
from swiftlite.families.index import architecture_of
from swiftlite.plan.cost.gpus import gpu_named
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.cost.speed import Step

DEMANDED = 0.8
"""Share of the speed estimated by `plan/cost/speed.py` that must be reached. The constants of the estimate were not
measured for these kernels."""


def run(settings: Settings, results: Results) -> None:
    """Measure with the kernels that `auto` selects and, if they are available, with Transformer Engine and with FP8."""
    if settings.model:
        config = json.loads((settings.model / "config.json").read_text(encoding="utf-8"))
        measure(settings, results, settings.model.name, config)
        return
    for size in settings.sizes:
        measure(settings, results, size, shape(size, settings.tiny))


def measure(settings: Settings, results: Results, name: str, hf_config: dict[str, Any]) -> None:
    speed = train(settings, results, name, hf_config)
    if settings.device == "cuda" and importlib.util.find_spec("transformer_engine"):
        options: dict[str, Any] = {"transformer_impl": "transformer_engine"}
        ratio = train(settings, None, name, hf_config, **options) / speed
        results.add(f"{name}, Transformer Engine: tokens/s relative to local", ratio)
        if torch.cuda.get_device_capability() >= (9, 0):
            options["fp8_format"] = "hybrid"
            ratio = train(settings, None, name, hf_config, **options) / speed
            results.add(f"{name}, FP8: tokens/s relative to local", ratio)


def train(settings: Settings, results: Results | None, name: str, hf_config: dict[str, Any], **options: Any) -> float:
    """Train on packed rows of one length. Add all measurements to `results`, and return tokens per second."""
    length, steps, micro_batch, global_batch = 4096, 10, 2, 4
    if settings.tiny:
        length, steps, global_batch = 64, 4, 2
    args = SftArgs(
        model="-",
        mtp_num_layers=1,
        mtp_init="random",
        padding_free=True,
        max_length=length,
        micro_batch_size=micro_batch,
        global_batch_size=global_batch,
        train_iters=steps,
        **options,
    )
    free_memory()
    rows = random_rows(steps * global_batch, length, hf_config["vocab_size"])
    with trainee(hf_config, args, rows, settings.model) as trainer:
        is_cuda = trainer.mesh.device.is_cuda
        middle = medians([trainer.step(step) for step in range(1, steps)][steps // 4 :])
        events = profiled(lambda: trainer.step(steps), is_cuda)
    if results:
        report(settings, middle, name, hf_config, length, results)
        for key, share, count in slowest(events, is_cuda):
            results.add(f"{name}, part of a step: {key}", f"{share:.1%}, {count} calls")
        for key, count in waits(events).items():
            results.add(f"{name}, waits in a step: {key}", count)
    return middle["tokens_per_second"]


def report(
    settings: Settings,
    middle: dict[str, float],
    name: str,
    hf_config: dict[str, Any],
    length: int,
    results: Results,
) -> None:
    """Add the medians over the steps to the results."""
    results.add(f"{name}, loss", middle["loss"])
    tokens = middle["tokens_per_second"]
    gpu = None
    if settings.device == "cuda":
        gpu = gpu_named(torch.cuda.get_device_name())
    if gpu is None:
        results.add(f"{name}, tokens/s", tokens)
    else:
        setup = Setup(micro_batch_size=2, max_length=length, heads=Heads(1), is_fused=True)
        estimated = Step(architecture_of(hf_config), setup, gpu, 4).tokens_per_second
        demanded = f"{DEMANDED:.0%} of the estimated {estimated:.0f}"
        results.add(f"{name}, tokens/s", tokens, tokens >= DEMANDED * estimated, demanded)
    results.add(f"{name}, peak memory, GB", middle["peak_memory_gb"])
    if "mfu" in middle:
        results.add(f"{name}, MFU", middle["mfu"])
