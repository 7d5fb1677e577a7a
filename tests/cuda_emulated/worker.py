"""Run commands in one process, on the emulated device, the CPU or a GPU:

    python -m tests.cuda_emulated.worker emulated|cpu|cuda DIRECTORY KIND...

For each kind, a JSON file `DIRECTORY/results/DEVICE/KIND.json` contains the output, the metrics by step, and the
recorded events.
"""

import gc
import io
import json
import os
import shutil
import signal
import sys
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP}


def main(device: str, directory: Path, names: list[str]) -> None:
    if device != "cuda":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if device == "emulated":
        from tests.cuda_emulated import library

        library.load()
        from tests.cuda_emulated import answers

        answers.install()
    from tests.cuda_emulated.kinds import KINDS

    watch_steps()
    if device == "cpu":
        from swiftlite.train import phases

        phases.write_page = lambda run: None  # only the losses are compared
    results = directory / "results" / device
    results.mkdir(parents=True, exist_ok=True)
    here = directory / device
    here.mkdir(exist_ok=True)
    for item in directory.iterdir():  # runs write into directories of their own
        if item.name not in ("results", "cpu", "emulated", "cuda") and not (here / item.name).exists():
            (here / item.name).symlink_to(item)
    for name in names:
        found = run(KINDS[name], here, name, is_device=device != "cpu")
        partial = results / f"{name}.partial"
        partial.write_text(json.dumps(found, indent=1))
        partial.rename(results / f"{name}.json")  # the stage `kinds` of scripts/gpu reads results as they appear
        shutil.rmtree(here / "runs" / name, ignore_errors=True)


def compute_on_cpu(directory: Path, names: list[str]) -> None:
    """Do in a forked process what this program does for the CPU."""
    import torch

    torch.set_num_threads(1)
    main("cpu", directory, names)


def run(kind: Any, directory: Path, name: str, is_device: bool) -> dict[str, Any]:
    """Run one kind, and return its output, metrics and events."""
    from swiftlite.cli.main import main as swiftlite
    from tests.cuda_emulated.kinds import STEPS, words_of
    from tests.cuda_emulated.record import RECORDER

    RECORDER.clear()
    words = words_of(kind, directory, directory / "runs" / name)
    if is_device:
        words += kind.device_options.split()
    commands = [words]
    if kind.resumed:
        commands.append([*words, "--resume", "--train_iters", str(2 * STEPS)])
    said, codes = io.StringIO(), []
    start = time.perf_counter()
    with redirect_stdout(said), redirect_stderr(said):
        for command in commands:
            gc.collect()  # models and their groups refer to each other in circles
            gc.freeze()  # otherwise every collection visits all modules, which takes half a second
            try:
                codes.append(swiftlite(command))
            except Exception:
                traceback.print_exc(file=said)
                codes.append("raised")
    if STOPPED & {*codes}:
        sys.exit(f"{name}: stopped by a signal")
    output = directory / "runs" / name
    metrics = output / "metrics.jsonl"
    return {
        "codes": codes,
        "said": said.getvalue(),
        "seconds": round(time.perf_counter() - start, 2),
        "files": sorted(path.name for path in output.glob("*")),
        "metrics": [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else [],
        "events": [vars(event) | {"count": count} for event, count in RECORDER.events.items()],
        "steps": RECORDER.steps,
        "borders": RECORDER.borders,
        "micro_batches": RECORDER.micro_batches,
        "launches": dict(RECORDER.launches),
        "kernels": dict(RECORDER.kernels),
    }


def watch_steps() -> None:
    """Tell the recorder when a step, a model and a layer begin and end."""
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from torch.nn.modules import module

    from swiftlite.model.gpt import GPTModel
    from swiftlite.train.trainer import Trainer
    from tests.cuda_emulated.record import RECORDER

    take_step = Trainer.step

    def taken(self: Trainer, step: int) -> dict[str, float]:
        RECORDER.is_in_step = True
        try:
            return take_step(self, step)
        finally:
            RECORDER.is_in_step, RECORDER.layers, RECORDER.models = False, 0, 0
            RECORDER.steps += 1
            RECORDER.borders.append(RECORDER.launches["border"] - sum(RECORDER.borders))

    Trainer.step = taken

    def move(layer: Any, by: int) -> None:
        if isinstance(layer, TransformerLayer):
            RECORDER.layers += by
        elif isinstance(layer, GPTModel):
            RECORDER.models += by
            RECORDER.micro_batches += by > 0 and RECORDER.is_in_step

    module.register_module_forward_pre_hook(lambda layer, inputs: move(layer, 1))
    module.register_module_forward_hook(lambda layer, inputs, output: move(layer, -1), always_call=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute(), sys.argv[3:])
