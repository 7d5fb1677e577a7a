"""Measure the time of training that a checkpoint costs, synchronous and asynchronous, with and without divided writing.

    python scripts/bench/checkpoint.py [--ranks 2] [--hidden_size 512] [--layers 6] [--repeats 5] [--distributed]

The ranks are data-parallel, over gloo. The reference ("before") is a checkpoint in which each tensor is written by the
first rank that holds it. Steps with and without a checkpoint, and both ways to write, alternate in the same processes.
The cost of a checkpoint is the time of saving and of the steps until its files are complete, minus the time of as many
steps without a checkpoint. The results are medians. `--repeats 3` takes four minutes on 2 cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

WORDS = "the loss of a step is the same sum over the same targets in each case up to the order of sums".split()


def write_inputs(directory: Path, hidden_size: int, layers: int) -> None:
    """Write a model with random weights, and rows."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    vocabulary = {word: number for number, word in enumerate(["<end>", "<unknown>", *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        head_dim=64,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    fast.save_pretrained(directory / "model")
    rows = [json.dumps({"text": " ".join(WORDS * 6)})] * 64
    (directory / "rows.jsonl").write_text("\n".join(rows))


def measure(directory: Path, repeats: int, is_distributed: bool) -> None:
    """Run one rank. The first rank prints the results as JSON."""
    import torch
    import torch.distributed as dist

    from swiftlite.args.commands import PtArgs
    from swiftlite.families.resolved import resolve_options
    from swiftlite.train import phases
    from swiftlite.train.run import make_trainer, prepare

    torch.set_num_threads(1)
    args = PtArgs(
        model=str(directory / "model"),
        dataset=[str(directory / "rows.jsonl")],
        output_dir=str(directory / "run"),
        torch_dtype="float32",
        mtp_num_layers=0,
        micro_batch_size=1,
        global_batch_size=dist_size(),
        train_iters=10**6,
        save_total_limit=1,
        use_distributed_optimizer=is_distributed,
        report_to=[],
    )
    models = resolve_options(args)
    with phases.open_session(args, models["model"]) as mesh:
        run = prepare(args, mesh, models)
        trainer = make_trainer(run, phases.restore(run))
        checkpointer = trainer.checkpointer
        assert checkpointer is not None
        ways: dict[str, Any] = {"before": checkpointer._strategy, "after": checkpointer._divided}
        steps = count(1)

        def seconds_of(number: int) -> float:
            start = time.perf_counter()
            for _ in range(number):
                trainer.step(next(steps))
            dist.barrier()
            return time.perf_counter() - start

        def all_see(path: Path) -> bool:
            """Return whether the path exists, with the same result on all ranks, which must take equally many steps."""
            seen = torch.tensor(int(path.exists()))
            dist.all_reduce(seen, dist.ReduceOp.MIN)
            return bool(seen)

        def cost(way: str, is_async: bool) -> float:
            checkpointer._divided, checkpointer.is_async = ways[way], is_async
            dist.barrier()
            start = time.perf_counter()
            step = next(steps)
            checkpointer.save(step)
            taken = 0
            while not all_see(run.output_dir / f"checkpoint-{step}"):
                trainer.step(next(steps))
                checkpointer.poll()
                taken += 1
            dist.barrier()
            spent = time.perf_counter() - start
            return spent - seconds_of(max(taken, 3)) * taken / max(taken, 3)

        for way in ways:
            cost(way, False)  # the first save plans and allocates
        kinds = [(way, is_async) for is_async in (False, True) for way in ways]
        found = {f"{way} {is_async}": [] for way, is_async in kinds}
        for _ in range(repeats):
            for way, is_async in kinds:
                found[f"{way} {is_async}"].append(cost(way, is_async))
        if run.is_first_rank:
            files = max(run.output_dir.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime).iterdir()
            print(json.dumps({"bytes": sum(path.stat().st_size for path in files), "seconds": found}))


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--distributed", action="store_true", help="use the distributed optimizer")
    parser.add_argument("--one_rank", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_rank:
        measure(Path(args.one_rank), args.repeats, args.distributed)
        return
    with tempfile.TemporaryDirectory() as directory:
        write_inputs(Path(directory), args.hidden_size, args.layers)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(args.ranks), __file__]
        command += ["--one_rank", directory, "--repeats", str(args.repeats), *["--distributed"] * args.distributed]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
    print(f"{args.ranks} ranks, a checkpoint of {found['bytes'] / 1e6:.0f} MB")
    for is_async, name in ((False, "synchronous"), (True, "asynchronous")):
        before, after = (statistics.median(found["seconds"][f"{way} {is_async}"]) for way in ("before", "after"))
        print(f"{name}: {before:.2f} s before, {after:.2f} s after   {after / before:.2f}x")


if __name__ == "__main__":
    main()
