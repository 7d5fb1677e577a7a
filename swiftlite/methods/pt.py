"""Describe `megatron pt`, which learns the next token of plain text."""

from swiftlite.args.commands import PtArgs
from swiftlite.methods.method import Lines, Method


def describe(args: PtArgs) -> Lines:
    """Return the plan's lines about documents."""
    content = "plain text"
    if args.append_eos:
        content += ", eos after each document"
    return [("learns from", content)]


PT = Method(
    name="pt",
    words="megatron pt",
    args_class=PtArgs,
    line="train on plain text (continued pre-training)",
    training="swiftlite.train.methods.pt:PT",
    rules="swiftlite.rules.training.pt",
    describe=describe,
    splits_long_rows=True,
)
