"""Measure streaming: samples/s of several readers and of one reader, waiting time of training, and balance of ranks.

    python scripts/bench/streaming.py --model HF_DIR [--rows 4000] [--readers 2] [--seconds 0.5]

Rows have lognormal lengths (mean 400 words). The reference is one process that reads and tokenizes all samples, as in a
job whose first rank reads for all ranks. The readers are processes over gloo that each read all lines but tokenize a
share, exchange lengths, and exchange the samples of each step (--sequence_packing_scheduler dp_balanced). Then the same
steps run with --seconds of simulated GPU work between them, during which the CPU is idle. The time of reading that
remains is the time for which a step waits. The cost of a line that another reader tokenizes is printed as well.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

PER_RANK = 16  # samples per step
ROW = 4096
MAX_LENGTH = 4096
WORDS = "the loss of a step is the same sum over the same targets in each case up to the order of sums".split()


def write_rows(path: Path, number: int) -> None:
    random = np.random.RandomState(0)
    lengths = np.clip(random.lognormal(np.log(400) - 0.5, 1.0, number), 5, 2500).astype(int)
    with path.open("w") as file:
        for length in lengths.tolist():
            words = " ".join(random.choice(WORDS, length))
            file.write(json.dumps({"query": "What is it?", "response": words}) + "\n")


def open_stream(model: str, file: str, readers=None):
    from swiftlite.bridge.hf_config import read_config
    from swiftlite.data.encoder import ConversationEncoder
    from swiftlite.data.packing.stream import Stream
    from swiftlite.data.template import ChatTemplate, load_tokenizer

    template = ChatTemplate(load_tokenizer(model), vocab_size=read_config(Path(model))["vocab_size"])
    return Stream([file], ConversationEncoder(template, MAX_LENGTH, "right"), readers=readers)


def read_alone(model: str, file: str, number: int) -> float:
    """Return the samples/s of a single reader of all rows."""
    stream = open_stream(model, file)
    stream.take(itertools.islice(stream, 100))  # warm-up
    start = time.perf_counter()
    stream.take(itertools.islice(stream, number))
    return number / (time.perf_counter() - start)


def pass_over(file: str, number: int) -> float:
    """Return the seconds per row for which a reader passes over rows that other readers parse and tokenize."""
    from swiftlite.data.packing.stream import FilePart
    from swiftlite.data.rows.sources import DataFile, find_rows

    found = find_rows(file)
    assert isinstance(found, DataFile)
    part = FilePart({0: found}, {})
    start = time.perf_counter()
    for _ in range(number):
        next(part)
    return (time.perf_counter() - start) / number


def read_together(model: str, file: str, number: int, seconds: float) -> None:
    """Run one of several readers.

    The first reader prints samples/s, the seconds for which a step waits, and the imbalance of ranks.
    """
    import torch
    import torch.distributed as dist

    from swiftlite.bridge.hf_config import read_config
    from swiftlite.data.packing.schedule import schedule
    from swiftlite.data.packing.stream import Readers
    from swiftlite.plan.cost.flops import training_flops
    from swiftlite.train.batches.exchange import exchange, gather

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    rank, size = group.rank(), group.size()
    stream = open_stream(model, file, Readers(rank, size, partial(gather, group=group, device=device)))
    flops = training_flops(read_config(Path(model)))
    imbalances = []

    def step() -> None:
        entries = list(itertools.islice(stream, PER_RANK * size))
        entries.sort(key=stream.owner)
        lengths = [[entry.length for entry in entries if stream.owner(entry) == owner] for owner in range(size)]
        flat = [entry.length for entry in entries]
        planned = schedule(flat, ROW, size, linear=flops.per_token, square=flops.square)
        imbalances.append(planned.imbalance)
        assignment = [np.concatenate(planned.rank(one)).tolist() for one in range(size)]
        exchange(stream.take(entries), lengths, assignment, group, device)

    def timed(number_of_steps: int, pause: float) -> float:
        waited = 0.0
        for _ in range(number_of_steps):
            start = time.perf_counter()
            step()
            waited += time.perf_counter() - start
            time.sleep(pause)
        return waited / number_of_steps

    timed(4, 0)
    num_steps = number // (PER_RANK * size)
    at_once = timed(num_steps, 0)
    with_work = timed(max(10, num_steps // 10), seconds)
    if rank == 0:
        print(PER_RANK * size / at_once, at_once, with_work, float(np.mean(imbalances)), max(imbalances))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--one_of_several", default="")
    args = parser.parse_args()
    if args.one_of_several:
        read_together(args.model, args.one_of_several, args.rows, args.seconds)
        return
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rows.jsonl"
        write_rows(file, args.rows)
        alone = read_alone(args.model, str(file), args.rows)
        print(f"one reader for all: {alone:.0f} samples/s")
        passing = pass_over(str(file), args.rows)
        print(f"a row of another reader: {1e6 * passing:.1f} us   {passing * alone:.4f}x of a row that is tokenized")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(args.readers), __file__]
        command += ["--model", args.model, "--rows", str(args.rows), "--seconds", str(args.seconds)]
        command += ["--one_of_several", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
    together, at_once, with_work, mean, worst = map(float, done.stdout.split())
    print(f"{args.readers} readers: {together:.0f} samples/s   {together / alone:.2f}x of one reader for all")
    print(f"a step of {PER_RANK * args.readers} samples: {1000 * at_once:.1f} ms to read and exchange")
    print(f"the same behind {args.seconds:g} s of work: waits {1000 * with_work:.1f} ms   {with_work / at_once:.2f}x")
    print(f"work of the busiest rank over the mean: {mean:.4f} on average, {worst:.4f} at most")


if __name__ == "__main__":
    main()
