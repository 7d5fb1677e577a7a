"""Describe `megatron sft`, which learns the next token of conversations."""

from swiftlite.args.commands import SftArgs
from swiftlite.methods.method import Lines, Method


def describe(args: SftArgs) -> Lines:
    """Return an empty list, because conversations are the default."""
    return []


SFT = Method(
    name="sft",
    words="megatron sft",
    args_class=SftArgs,
    line="fine-tune a model and its MTP heads",
    training="swiftlite.train.methods.sft:SFT",
    rules="swiftlite.rules.training.sft",
    describe=describe,
)
