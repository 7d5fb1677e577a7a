"""Rules of the teacher of `megatron gkd` and `megatron grpo`."""

from collections.abc import Iterator

from swiftlite.args.bounds import out_of_bounds
from swiftlite.args.commands import GkdArgs, GrpoArgs
from swiftlite.args.config import Problem
from swiftlite.families.index import FAMILIES, known_architecture
from swiftlite.plan.distillation import teacher_layout
from swiftlite.plan.facts import Facts, near_path
from swiftlite.rules import common


def teacher_is_a_model(args: GkdArgs | GrpoArgs, facts: Facts) -> Iterator[Problem]:
    if args.teacher_model is None:
        return
    directory, config = facts.described("teacher_model")
    vocab_size, expected = (each.get("vocab_size") for each in (config, facts.hf_config))
    if not config:
        yield (
            f"--teacher_model {args.teacher_model} has no config.json",
            near_path(directory) or "give the directory of a Hugging Face model",
        )
    elif known_architecture(config) is None:
        yield (
            f"--teacher_model {args.teacher_model}: unknown model_type {config.get('model_type')}",
            f"known: {', '.join(FAMILIES)}",
        )
    elif facts.hf_config and vocab_size != expected:
        yield (
            f"--teacher_model {args.teacher_model} has vocab_size {vocab_size}, --model has {expected}",
            "give a model with the same tokenizer and vocab_size",
        )


def teacher_fits_the_layout(args: GkdArgs | GrpoArgs, facts: Facts) -> Iterator[Problem]:
    """Reject layouts that suit the trained model but not the teacher."""
    if args.teacher_model is None or out_of_bounds(args):
        return
    architecture = known_architecture(facts.described("teacher_model")[1])
    layout = teacher_layout(args, architecture)
    for problem, hint in common.problems_beside("teacher", layout, architecture, args, facts):
        yield f"--teacher_model {args.teacher_model}: {problem}", hint
