"""Describe `megatron gkd`, which distils a teacher model into the trained model."""

from swiftlite.args.commands import GkdArgs
from swiftlite.methods.grpo import generator_of
from swiftlite.methods.method import Lines, Method


def describe(args: GkdArgs) -> Lines:
    """Return the plan's lines about the teacher, the loss and the completions."""
    lines = [
        ("teacher", args.teacher_model or ""),
        ("learns from", f"the teacher's distribution, beta {args.beta:g}, at temperature {args.loss_temperature:g}"),
    ]
    drawn = f"{args.lmbda:.0%} of the steps, by {generator_of(args)}"
    if args.rollouts_from:
        drawn = f"{args.lmbda:.0%} of the steps, stored in {args.rollouts_from}"
    if args.lmbda:
        lines.append(("completions", drawn))
    return lines


def describe_files(args: GkdArgs) -> Lines:
    """Return the plan's line about stored completions."""
    if args.rollouts_from or not args.lmbda:
        return []
    return [("rollouts/", "the completions of each step that samples them; a resumed run reads them")]


GKD = Method(
    name="gkd",
    words="megatron gkd",
    args_class=GkdArgs,
    line="distil a teacher model (GKD), also on the model's own completions",
    training="swiftlite.rollouts.distillation:GKD",
    rules="swiftlite.rules.training.gkd",
    describe=describe,
    describe_files=describe_files,
    evaluates=lambda args: args.lmbda < 1,
    imitates_rows=False,
    detaches_heads=True,
    temperature=lambda args: args.loss_temperature,
)
