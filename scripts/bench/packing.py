"""Measure packing and scheduling (fill, time and balance) against other implementations.

    pip install binpacking
    python scripts/bench/packing.py [--rounds 3]

Packing: lognormal lengths (mean 512 and 2048 tokens) are packed into rows of 4,096 tokens, and compared with
    `binpacking.to_constant_volume` over chunks of 1,000 lengths, as in ms-swift. Both get the lengths as a list and
    return the sequences of each row. Streams: the same lengths are packed with the bounded look-ahead. Scheduling: the
    work of the busiest rank relative to the mean, compared with assigning sequences to ranks in turn. If a single
    sequence has more work than the mean, its work is shown as the bound. The exit code is 1 if a target is missed.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import binpacking  # pyright: ignore[reportMissingImports]
import contest
import numpy as np

from swiftlite.data.packing.packing import RowStream, StreamSample, pack
from swiftlite.data.packing.schedule import schedule
from swiftlite.plan.cost.flops import training_flops

ROW = 4096
CHUNK = 1000
FASTER, IMBALANCE, SCHEDULE_MS = 10, 1.05, 20
# Llama 3 8B, for the share of attention in a sequence's work.
HF_CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def lognormal(number: int, mean: float, sigma: float = 1.0, longest: int = ROW) -> np.ndarray:
    drawn = np.random.RandomState(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, number)
    return np.clip(drawn, 1, longest).astype(np.int64)


def pack_in_chunks(lengths: Sequence[int]) -> list[list[int]]:
    """Pack with `binpacking`, and return the rows as lists of indices."""
    pairs = list(enumerate(lengths))
    rows: list[list[tuple[int, int]]] = []
    for start in range(0, len(pairs), CHUNK):
        rows += binpacking.to_constant_volume(pairs[start : start + CHUNK], ROW, weight_pos=1)
    return [[index for index, _ in row] for row in rows]


def timed(function: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Return the median seconds of a function, and its result."""
    seconds, results = zip(*(contest.timed(function) for _ in range(rounds)), strict=True)
    return statistics.median(seconds), results[-1]


def bench_packing(number: int, mean: int, rounds: int) -> bool:
    array = lognormal(number, mean)
    lengths = array.tolist()
    seconds, rows = timed(lambda: pack(lengths, ROW), rounds)
    theirs_seconds, theirs = timed(lambda: pack_in_chunks(lengths), rounds)
    for order, count in ((rows.order, len(rows)), (np.concatenate(theirs), len(theirs))):
        assert np.array_equal(np.sort(order), np.arange(number))
        assert count * ROW >= array.sum()
    fill, their_fill = (array.sum() / (count * ROW) for count in (len(rows), len(theirs)))
    what = f"{number:>9,} lengths, mean {mean:>4}"
    print(f"{what}: {seconds:7.3f} s against {theirs_seconds:7.3f} s   {theirs_seconds / seconds:6.1f}x as fast")
    print(f"{what}: fill {fill:.3%} against {their_fill:.3%}   {(1 - fill) / (1 - their_fill):6.3f}x of the waste")
    return theirs_seconds / seconds < FASTER or fill < their_fill


def bench_stream(number: int, mean: int) -> None:
    array = lognormal(number, mean)
    samples = (StreamSample(i, 0, length) for i, length in enumerate(array.tolist()))
    seconds, count = timed(lambda: sum(1 for _ in RowStream(samples, ROW, CHUNK)), 1)
    fill = array.sum() / (count * ROW)
    print(f"{number:>9,} as a stream, mean {mean:>4}, {CHUNK} looked ahead: {seconds:6.3f} s, fill {fill:.3%}")


def bench_schedule(ranks: int, per_rank: int, mean: int, row: int, rounds: int) -> bool:
    flops = training_flops(HF_CONFIG)
    lengths = lognormal(ranks * per_rank, mean, longest=row)
    seconds, plan = timed(
        lambda: schedule(lengths, row, ranks, linear=flops.per_token, square=flops.square), max(rounds, 5)
    )
    work = flops.per_token * lengths + flops.square * lengths.astype(np.float64) ** 2
    in_turn = work.reshape(-1, ranks).sum(axis=0)
    at_once = plan.work.max(axis=1).sum() / plan.work.sum() * ranks
    bound = max(1, work.max() / in_turn.mean())
    print(
        f"{len(lengths):>6,} sequences, mean {mean:>4}, rows of {row:>6,}, {ranks:>2} ranks: "
        f"max/mean work {plan.imbalance:.4f} (bound {bound:.4f}), in turn {in_turn.max() / in_turn.mean():.3f}; "
        f"all ranks waiting at each of {plan.num_micro_batches} micro-batches {at_once:.3f}; {1000 * seconds:5.1f} ms"
    )
    return plan.imbalance >= max(IMBALANCE, 1.001 * bound) or 1000 * seconds >= SCHEDULE_MS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    missed = [bench_packing(number, mean, rounds) for number in (200_000, 1_000_000) for mean in (512, 2048)]
    for mean in (512, 2048):
        bench_stream(200_000, mean)
    for mean, row in ((512, 4096), (2048, 8192), (2048, 32768)):
        missed += [bench_schedule(ranks, 64, mean, row, rounds) for ranks in (2, 4, 8, 16, 32, 64)]
    return int(any(missed))


if __name__ == "__main__":
    sys.exit(main())
