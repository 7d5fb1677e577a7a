"""Describe `megatron rm`, which trains a reward model on pairs of answers."""

from swiftlite.args.commands import RmArgs
from swiftlite.methods.method import Lines, Method


def describe(args: RmArgs) -> Lines:
    """Return the plan's line about the answers and the loss."""
    loss = "Bradley-Terry"
    if args.center_rewards_coefficient:
        loss += f", rewards centered with the coefficient {args.center_rewards_coefficient:g}"
    return [("learns from", f"pairs of answers, {loss}")]


RM = Method(
    name="rm",
    words="megatron rm",
    args_class=RmArgs,
    line="train a reward model on pairs of answers",
    training="swiftlite.train.methods.rm:RM",
    rules="swiftlite.rules.training.rm",
    describe=describe,
    sequences_per_sample=2,
    imitates_rows=False,
)
