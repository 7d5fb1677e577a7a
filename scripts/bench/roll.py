"""Compare `roll_packed` with megatron-core's `roll_tensor`: shift ids of a packed row by one within each sequence.

    python scripts/bench/roll.py
    python scripts/bench/roll.py --num_sequences 256 --context_parallel_size 4

Prints one line per number of context-parallel ranks: the milliseconds of both functions (median over runs, slowest
rank) and their ratio. First the results of both functions are compared.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

MEAN_LENGTH = 128


def measure(roll: Callable[[], torch.Tensor], num_runs: int) -> float:
    """Return the milliseconds of one call, after a warm-up call."""
    roll()
    seconds = []
    for _ in range(num_runs):
        dist.barrier()
        start = time.perf_counter()
        roll()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(seconds))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return 1000 * float(slowest)


def compare(rank: int, size: int, num_sequences: int, num_runs: int, store: str) -> None:
    """Run the comparison on one rank."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    from swiftlite.model.context_parallel import shard_sequence
    from swiftlite.model.packed_roll import roll_packed

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = dist.group.WORLD
    torch.manual_seed(0)
    lengths = torch.randint(1, MEAN_LENGTH // size, (num_sequences,)) * 2 * size
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    ids = shard_sequence(torch.randint(1, 10**5, (1, int(lengths.sum()))), 1, rank, size, cu_seqlens)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)

    def stock() -> torch.Tensor:
        return roll_tensor(ids, cp_group=group, packed_seq_params=packed)[0]

    def ours() -> torch.Tensor:
        return roll_packed(ids, cu_seqlens, fill=0, cp_group=group)

    assert torch.equal(stock(), ours())
    stock_ms, ours_ms = measure(stock, max(1, num_runs // 50)), measure(ours, num_runs)
    if rank == 0:
        print(
            f"CP {size}: {num_sequences} sequences, {ids.size(1)} tokens per rank   "
            f"roll_tensor {stock_ms:9.2f} ms   roll_packed {ours_ms:7.3f} ms   {stock_ms / ours_ms:.0f}x",
            flush=True,
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_sequences", type=int, default=4096)
    parser.add_argument("--context_parallel_size", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=100, help="of ours; a fiftieth of it of the other")
    args = parser.parse_args()
    for size in args.context_parallel_size:
        with tempfile.TemporaryDirectory() as directory:
            arguments = (size, args.num_sequences, args.runs, str(Path(directory) / "store"))
            torch.multiprocessing.spawn(compare, arguments, nprocs=size)  # pyright: ignore[reportPrivateImportUsage]


if __name__ == "__main__":
    main()
