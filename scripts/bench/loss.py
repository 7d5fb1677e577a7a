"""Compare a loss computed from all logits at once with the chunked loss: peak bytes, seconds, and differences.

All losses run in one process, forward and backward, with a trained and with a frozen output matrix. With a trained one,
the chunked loss is measured twice: with weights of positions that are known in the backward pass, and in the forward
pass. Differences of losses and gradients are relative to the largest value.

    python scripts/bench/loss.py                                # 16,384 positions, 32,000 words, hidden size 64
    python scripts/bench/loss.py --positions 8192 --loss kl
"""

import argparse
from collections.abc import Callable
from itertools import accumulate
from typing import Any, get_args

import torch
from contest import timed

from swiftlite.args.fields import MtpLoss

Compute = Callable[[], list[torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=16384)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--loss", choices=get_args(MtpLoss), default="ce")
    args = parser.parse_args()
    from swiftlite.runtime.distributed import session

    with session() as mesh:
        for learns in (True, False):
            matrix = "frozen output layer"
            if learns:
                matrix = "trained output layer"
            print(f"{args.positions} positions, vocabulary of {args.vocab}, {args.loss}, {matrix}")
            found = {name: measure(compute) for name, compute in losses(args, learns, mesh.tp).items()}
            _, _, expected = found["all logits"]
            for name, (gigabytes, seconds, results) in found.items():
                pairs = zip(results, expected, strict=True)
                differences = [(ours - theirs).abs().max() / theirs.abs().max() for ours, theirs in pairs]
                numbers = ", ".join(f"{difference:.1e}" for difference in differences)
                print(f"  {name:<12} {gigabytes:6.2f} GB  {seconds:6.2f} s  differences {numbers}")
        print("differences: of losses, of gradients of the states, and of the output matrix")


def losses(args: argparse.Namespace, learns: bool, group: Any) -> dict[str, Compute]:
    """Return a function for each loss by name. Each function runs the forward and the backward pass, and returns losses
    and gradients."""
    from swiftlite.model.loss.chunked_loss import LabelTarget, TrunkTarget, chunked_loss
    from swiftlite.model.loss.losses import distillation_loss, select, token_loss

    torch.manual_seed(0)
    weight = torch.randn(args.vocab, args.hidden, requires_grad=learns)
    states = torch.randn(args.positions, args.hidden, requires_grad=True)
    trunk = torch.randn(args.positions, args.hidden)
    words = torch.randint(0, args.vocab, (args.positions,))
    selected = select(words[None], words.device)

    learned = [states]
    if learns:
        learned.append(weight)

    def whole() -> list[torch.Tensor]:
        if args.loss == "ce":
            found = token_loss(states @ weight.T, selected, group)
        else:
            found = distillation_loss(
                states @ weight.T, lambda rows: trunk[rows] @ weight.T, args.loss, selected, group
            )
        return [found.loss_BS, *torch.autograd.grad(found.loss_BS.sum(), learned)]

    def chunked(share_BS: torch.Tensor | None = None) -> list[torch.Tensor]:
        target = TrunkTarget(trunk, args.loss, weight.detach())
        if args.loss == "ce":
            target = LabelTarget(words)
        found = chunked_loss(states, weight, target, selected, group, share_BS=share_BS)
        total = found.loss_BS.sum() if found.total is None else found.total
        return [found.loss_BS, *torch.autograd.grad(total, learned)]

    computes = {"all logits": whole, "in chunks": chunked}
    if learns:
        computes["in one pass"] = lambda: chunked(torch.ones(1, args.positions))
    return computes


def measure(compute: Compute) -> tuple[float, float, list[torch.Tensor]]:
    """Return the peak gigabytes of tensors, and the seconds and the result of a second run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        compute()
    assert profile.profiler is not None
    events: Any = profile.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in events.events() if event.name() == "[memory]"]
    seconds, result = timed(compute)
    return max(accumulate(change for _, change in sorted(changes))) / 1e9, seconds, result


if __name__ == "__main__":
    main()
