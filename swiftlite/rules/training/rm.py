"""Rules of `megatron rm`: the rules of `megatron sft`, and rules for pairs and the score."""

from collections.abc import Iterator

from swiftlite.args.commands import RmArgs
from swiftlite.args.config import Problem
from swiftlite.families.index import FAMILIES
from swiftlite.families.reward_model import CLASSES
from swiftlite.plan.facts import Facts
from swiftlite.rules.training import dpo, sft


def family_has_reward_models(args: RmArgs, facts: Facts) -> Iterator[Problem]:
    """Require a class of transformers that opens the export."""
    name = str(facts.hf_config.get("model_type"))
    if name in FAMILIES and name not in CLASSES:
        yield (
            f"--model {args.model}: transformers has no class for reward models of model_type {name}",
            f"use a model of {', '.join(CLASSES)}",
        )


def score_is_trained(args: RmArgs, facts: Facts) -> Iterator[Problem]:
    if args.tuner_type == "lora" and "score" not in args.lora_modules_to_save:
        names = " ".join(["score", *args.lora_modules_to_save])
        yield "--lora_modules_to_save must contain score, whose first values are random", f"use {names}"


def heads_are_left_out(args: RmArgs, facts: Facts) -> Iterator[str]:
    """Yield a note that the heads of the model are not part of its reward model."""
    if facts.heads.layers:
        yield f"the MTP heads of --model ({facts.heads.layers}) are left out: a reward model has none"


RULES = (*sft.RULES, dpo.pairs_have_room, family_has_reward_models, score_is_trained)
NOTES = (*sft.NOTES, heads_are_left_out)
