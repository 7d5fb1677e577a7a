"""Measure how the ranks of a machine read the rows of a run: time, CPU time and memory, with and without a cache.

    python scripts/bench/rows.py --model HF_DIR [--rows 100000] [--words 4] [--ranks 1 2] [--num_proc 1]
    python scripts/bench/rows.py --model HF_DIR --cache      # then also the second start, which opens the cache

The rows are read by the function that training runs call (`load_data`), in processes over gloo, but without a model.
CPU time includes the processes that tokenize. Memory is what reading adds to a rank: its own pages, the pages of files
that all ranks map, and its peak. The memory of the machine counts mapped files once.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

WORDS = "the loss of a step is the same sum over the same targets in each case up to the order of sums".split()
TITLE = "ranks   start   wall s    CPU s   MB per rank: own  mapped    peak   MB in all"


def write_rows(path: Path, number: int, words: int) -> None:
    random = np.random.RandomState(0)
    with path.open("w") as file:
        for index in range(number):
            answer = " ".join(random.choice(WORDS, words))
            file.write(json.dumps({"system": "Count.", "query": f"What is {index}?", "response": answer}) + "\n")


def memory() -> np.ndarray:
    """Return the resident bytes of this process: anonymous, of mapped files, and both together at the peak."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    found = {words[0]: 1024 * int(words[1]) for words in lines if words[-1] == "kB"}
    return np.array([found["RssAnon:"], found["RssFile:"], found["VmHWM:"]])


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def read(model: str, file: str, num_proc: int, cache: str) -> None:
    """Run one rank. The first rank prints the results as JSON."""
    import torch
    import torch.distributed as dist

    from swiftlite.args.commands import SftArgs
    from swiftlite.data.template import load_tokenizer
    from swiftlite.families.resolved import resolve
    from swiftlite.runtime.distributed import session
    from swiftlite.train.methods.sft import SFT

    torch.set_num_threads(1)
    options: Any = {"dataset_cache": cache} if cache else {}
    args = SftArgs(model=model, dataset=[file], dataset_num_proc=num_proc, **options)
    hf_model = resolve(model)
    with session():
        tokenizer = load_tokenizer(hf_model.directory, False)
        encoder = SFT.make_encoder(args, tokenizer, hf_model)
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present size
        before, start, used = memory(), time.perf_counter(), cpu_seconds()
        data = SFT.load(args, encoder, hf_model.config["vocab_size"])
        seconds, used = time.perf_counter() - start, cpu_seconds() - used
        dist.barrier()
        added = memory() - before
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [seconds, used, *added.tolist(), data.digest])
    if os.environ["RANK"] == "0":
        print(json.dumps({"ranks": everyone, "tokens": data.report.total.tokens}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--words", type=int, default=4, help="words of an answer")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--num_proc", type=int, default=1)
    parser.add_argument("--cache", action="store_true", help="use --dataset_cache, and start twice")
    parser.add_argument("--one_rank", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_rank:
        read(args.model, args.one_rank[0], args.num_proc, args.one_rank[1])
        return
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rows.jsonl"
        write_rows(file, args.rows, args.words)
        for number, ranks in enumerate(args.ranks):
            cache = str(Path(directory) / f"cache-{number}") if args.cache else ""
            for start in ("first", "second") if cache else ("first",):
                command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), __file__]
                command += ["--model", args.model, "--num_proc", str(args.num_proc), "--one_rank", str(file), cache]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr)
                found = json.loads(done.stdout.splitlines()[-1])
                seconds, used, own, mapped, peak, digests = zip(*found["ranks"], strict=True)
                if number == 0 and start == "first":
                    print(f"{args.rows:,} rows of {found['tokens'] / args.rows:.1f} tokens, digest {digests[0][:16]}")
                    print(TITLE)
                megabytes = [number / 1e6 for number in (max(own), max(mapped), max(peak), sum(own) + max(mapped))]
                times = f"{ranks:5} {start:>7} {max(seconds):8.1f} {sum(used):8.1f}"
                print(times + "{:19.0f}{:8.0f}{:8.0f}{:12.0f}".format(*megabytes), flush=True)
                assert len(set(digests)) == 1


if __name__ == "__main__":
    main()
