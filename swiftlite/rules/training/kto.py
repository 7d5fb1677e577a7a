"""Rules of `megatron dpo --loss_type kto`: the rules of `megatron dpo` except those for pairs."""

from collections.abc import Iterator

from swiftlite.args.commands import DpoArgs
from swiftlite.plan.facts import Facts
from swiftlite.rules import common
from swiftlite.rules.training import dpo, sft


def settings_have_an_effect(args: DpoArgs, facts: Facts) -> Iterator[str]:
    """Yield a note for each changed option that only losses over pairs use."""
    idle = (True, f"--loss_type is {args.loss_type}")
    yield from common.without_effect(args, dict.fromkeys(("label_smoothing", "simpo_gamma", "cpo_alpha"), idle))


RULES = dpo.SHARED
NOTES = (*sft.NOTES, settings_have_an_effect)
