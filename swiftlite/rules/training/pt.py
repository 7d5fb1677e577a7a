"""Rules of `megatron pt`: the rules of `megatron sft`, and rules for documents."""

from collections.abc import Iterator

from swiftlite.args.commands import PtArgs
from swiftlite.args.config import Problem
from swiftlite.plan.facts import Facts
from swiftlite.rules import common
from swiftlite.rules.training import sft, sft_data

UNSUPPORTED = {
    "loss_scale": "all tokens of a document are trained",
    "system": "documents have no turns",
    **sft_data.IMAGE_OPTIONS,
    "sft_mock_dataset_config_json": "random tokens are not documents",
}


def options_of_sft_are_left_out(args: PtArgs, facts: Facts) -> Iterator[Problem]:
    yield from common.left_out(args, "megatron pt", UNSUPPORTED)


RULES = (*common.without_options(sft.RULES, UNSUPPORTED), options_of_sft_are_left_out)
NOTES = sft.NOTES
