"""Rules of `megatron sft` for the vision tower of a model."""

from collections.abc import Iterator

from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem
from swiftlite.families.index import FAMILIES
from swiftlite.plan.facts import Facts


def has_tower(facts: Facts) -> bool:
    """Return whether the model of a command has a vision tower, or another tower, that swiftlite can compute."""
    family = FAMILIES.get(str(facts.hf_config.get("model_type")))
    architecture = facts.architecture
    return (family is not None and family.vision is not None) or (
        architecture is not None and architecture.tower is not None
    )


def frozen_parts_can_be_trained(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    trained = [f"--{name} false" for name in ("freeze_vit", "freeze_aligner") if not getattr(args, name)]
    given = " and ".join(trained)
    if trained and not has_tower(facts) and facts.hf_config:
        yield f"{given} requires a model with a vision tower", f"remove {given}"
    elif trained and args.mtp_mode == "heads_only":
        yield f"{given} cannot be combined with --mtp_mode heads_only, which trains only heads", "remove one of the two"
    elif trained and args.tuner_type == "lora":
        yield f"{given} is not supported with --tuner_type lora", "use --tuner_type full"


def something_is_trained(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.freeze_llm and args.tuner_type == "lora":
        yield "--freeze_llm true is not supported with --tuner_type lora", "remove --freeze_llm"
    elif args.freeze_llm and args.freeze_vit and args.freeze_aligner:
        yield (
            "--freeze_llm true requires --freeze_vit false or --freeze_aligner false",
            "add one of them; to train only the MTP heads: swiftlite megatron sft --mtp_mode heads_only",
        )
