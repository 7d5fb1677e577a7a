"""Rules of `megatron sft` for profiles of training steps."""

from collections.abc import Iterator

from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem
from swiftlite.plan.facts import Facts

_RECORDS = {"memory": "the memory of a GPU", "nsys": "the work of a GPU"}


def profile_can_be_recorded(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not args.profile_steps:
        return
    steps = " ".join(map(str, args.profile_steps))
    if len(args.profile_steps) != 2 or not 1 <= args.profile_steps[0] <= args.profile_steps[1]:
        yield (
            f"--profile_steps {steps} must be the first and the last step to profile, counted from 1",
            "for example --profile_steps 10 12",
        )
    elif args.train_iters is not None and args.profile_steps[1] > args.train_iters:
        problem = f"--profile_steps {steps} is past the last step, --train_iters {args.train_iters}"
        yield problem, f"use steps up to {args.train_iters}" if args.train_iters else "remove it: no step is trained"
    ranks = args.profile_ranks
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(facts.world_size)):
        given = " ".join(map(str, ranks)) or "none"
        yield (
            f"--profile_ranks {given} must be different ranks of this run, which are 0 to {facts.world_size - 1}",
            "for example --profile_ranks 0",
        )
    if args.profile_kind in _RECORDS and not args.dry_run and not facts.machine.is_cuda:
        problem = f"--profile_kind {args.profile_kind} records {_RECORDS[args.profile_kind]}, and there is no GPU here"
        yield problem, "use --profile_kind torch, which also profiles a CPU"
