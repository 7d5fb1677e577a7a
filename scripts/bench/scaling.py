"""Scaling: a training step over 1 and 2 processes, strong (the same batch) and weak (twice the batch), against plain
torch DistributedDataParallel on the same transformers model.

    python scripts/bench/scaling.py [--steps 12] [--rounds 3] [--processes 2]

One line per figure: tokens/s, and its ratio to the same contestant on one process (2.0x would be perfect). Data
parallel, one thread per process, no MTP (the plain model has none), float32, AdamW, gradients summed in float32. Each
round runs everything in turn in fresh processes, so that a slow spell of the machine hits all.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROWS, LENGTH = 8, 256
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


def random_rows(step: int, rank: int, rows: int):
    """Token ids [rows, LENGTH] of one rank's part of a step."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, SIZES["vocab_size"], (rows, LENGTH), generator=generator)


def plain_steps(model_dir: Path, rows: int, steps: int) -> Iterator[None]:
    """torch DDP around the transformers model."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoModelForCausalLM

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step in range(steps):
        tokens = random_rows(step, rank, rows // size)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield
    dist.destroy_process_group()


def swiftlite_steps(model_dir: Path, rows: int, steps: int) -> Iterator[None]:
    """The trainer of `swiftlite megatron sft`, given ready rows."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from swiftlite import families
    from swiftlite.args.commands import SftArgs
    from swiftlite.bridge.hf_config import read_config
    from swiftlite.bridge.transfer import load_hf
    from swiftlite.data.batch import collate
    from swiftlite.data.sample import make_sample
    from swiftlite.estimate.flops import training_flops
    from swiftlite.heads import Heads
    from swiftlite.model.build import build_model
    from swiftlite.plan.run import make_plan, make_schedule
    from swiftlite.runtime.distributed import session
    from swiftlite.train.methods.next_token import NextTokenObjective
    from swiftlite.train.optim import make_optimizer, wrap_model
    from swiftlite.train.trainer import Trainer

    hf_config = read_config(model_dir)
    family = families.get(hf_config)
    with session() as mesh:
        rank, size = dist.get_rank(), dist.get_world_size()
        args = SftArgs(
            torch_dtype="float32", micro_batch_size=rows // size, global_batch_size=rows, train_iters=steps, lr=1e-4
        )
        plan, schedule = make_plan(args, size, Heads()), make_schedule(args, rows * steps)
        model = build_model(family.architecture(hf_config), hf_config, mesh=mesh, dtype=torch.float32)
        load_hf(model, model_dir, family, hf_config)
        wrapped = wrap_model(model, mesh, torch.float32, args)
        optimizer, scheduler = make_optimizer(args, plan, schedule, wrapped, mesh)

        def batches(step: int):
            weights = np.ones(LENGTH, np.float32)
            return [collate([make_sample(row, weights) for row in random_rows(step, rank, rows // size).numpy()], 0)]

        trainer = Trainer(
            mesh=mesh,
            model=wrapped,
            objective=NextTokenObjective(Heads(), 0.1),
            optimizer=optimizer,
            scheduler=scheduler,
            plan=plan,
            schedule=schedule,
            train_batches=batches,
            eval_batches=[],
            count_flops=lambda tokens, squares, counts: training_flops(hf_config).step(tokens, squares, counts[0]),
            sinks=[],
            logging_steps=1,
            checkpointer=None,
        )
        for step in range(1, steps + 1):
            trainer.step(step)
            yield


CONTESTANTS: dict[str, Callable[[Path, int, int], Iterator[None]]] = {
    "plain DDP": plain_steps,
    "swiftlite": swiftlite_steps,
}


def work(contestant: str, model_dir: Path, rows: int, steps: int) -> None:
    """Runs in each process; the first prints the seconds of each step."""
    seconds, last = [], time.perf_counter()
    for _ in CONTESTANTS[contestant](model_dir, rows, steps):
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    if os.environ["RANK"] == "0":
        print(json.dumps(seconds))


def run(contestant: str, model_dir: Path, rows: int, processes: int, options: argparse.Namespace) -> list[float]:
    """Tokens/s of the steps that count."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", __file__]
    command += ["--contestant", contestant, "--model", str(model_dir), "--rows", str(rows)]
    command += ["--steps", str(options.steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    seconds = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    return [rows * LENGTH / second for second in seconds[options.steps // 3 :]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps per run; the first third does not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        work(options.contestant, options.model, options.rows, options.steps)
        return
    many = options.processes
    runs = [
        ("1 process", 1, ROWS),
        (f"{many} processes, strong", many, ROWS),
        (f"{many} processes, weak", many, many * ROWS),
    ]
    speed: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(directory)
        for _ in range(options.rounds):
            for contestant in CONTESTANTS:
                for label, processes, rows in runs:
                    measured = run(contestant, Path(directory), rows, processes, options)
                    speed.setdefault((contestant, label), []).extend(measured)
    median = {name: statistics.median(values) for name, values in speed.items()}
    for (contestant, label), tokens in median.items():
        alone, rival = median[contestant, "1 process"], median["plain DDP", label]
        print(
            f"{contestant:<10} {label:<20} {tokens:8.0f} tokens/s   {tokens / alone:.2f}x of 1 process   "
            f"{tokens / rival:.2f}x of plain DDP"
        )


if __name__ == "__main__":
    main()
