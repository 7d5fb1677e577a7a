"""`megatron pt`: the next token of plain text."""

from swiftlite.args.commands import PtArgs
from swiftlite.methods.method import Lines, Method


def describe(args: PtArgs) -> Lines:
    """Return what documents are."""
    return [("learns from", "plain text" + (", each document closed by eos" if args.append_eos else ""))]


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
