"""A loss from all logits against the same in chunks: the most bytes that are held at one time, and seconds.

Both in one process, one after the other, forward and backward, with a matrix that learns and with a frozen one.

    python scripts/bench/loss.py                                # 4,096 positions, 150,000 words, 512 wide
    python scripts/bench/loss.py --positions 8192 --loss kl
"""

import argparse
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any, get_args

import torch

from swiftlite.args.fields import MtpLoss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--loss", choices=get_args(MtpLoss), default="ce")
    args = parser.parse_args()
    from swiftlite.runtime.distributed import session

    with session() as mesh:
        for learns in (True, False):
            matrix = "the matrix learns" if learns else "the matrix stays"
            print(f"{args.positions} positions, {args.vocab} words, {args.loss}, {matrix}")
            figures = {name: measure(loss) for name, loss in losses(args, learns, mesh.tp).items()}
            for name, (gigabytes, seconds) in figures.items():
                print(f"  {name:<12} {gigabytes:6.2f} GB  {seconds:6.2f} s")
            (whole, slow), (chunked, fast) = figures.values()
            print(f"  in chunks: {chunked / whole:.2f} of the memory, {fast / slow:.2f} of the time")


def losses(args: argparse.Namespace, learns: bool, group: Any) -> dict[str, Callable[[], None]]:
    """Forward and backward pass of each way."""
    from swiftlite.model.chunked_loss import TrunkStates, Words, chunked_loss
    from swiftlite.model.loss import distillation_loss, token_loss

    torch.manual_seed(0)
    weight = torch.randn(args.vocab, args.hidden, requires_grad=learns)
    states = torch.randn(args.positions, args.hidden, requires_grad=True)
    trunk = torch.randn(args.positions, args.hidden)
    words = torch.randint(0, args.vocab, (args.positions,))
    picked = torch.ones(1, args.positions, dtype=torch.bool)

    def whole() -> None:
        if args.loss == "ce":
            found = token_loss(states @ weight.T, words, picked, group)
        else:
            found = distillation_loss(states @ weight.T, lambda rows: trunk[rows] @ weight.T, args.loss, picked, group)
        found.loss_BS.sum().backward()

    def chunked() -> None:
        target = Words(words) if args.loss == "ce" else TrunkStates(trunk, args.loss)
        chunked_loss(states, weight, target, picked, group).loss_BS.sum().backward()

    return {"all logits": whole, "in chunks": chunked}


def measure(compute: Callable[[], None]) -> tuple[float, float]:
    """Gigabytes that tensors have at most, and seconds of a second run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        compute()
    assert profile.profiler is not None
    events: Any = profile.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in events.events() if event.name() == "[memory]"]
    start = time.perf_counter()
    compute()
    return max(accumulate(change for _, change in sorted(changes))) / 1e9, time.perf_counter() - start


if __name__ == "__main__":
    main()
