"""Rules of `megatron dpo`: the rules of `megatron sft`, and rules for pairs and the reference model."""

import math
from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.bounds import out_of_bounds
from swiftlite.args.commands import DpoArgs, GrpoArgs, RmArgs
from swiftlite.args.config import Problem
from swiftlite.args.fields import ParallelLayout
from swiftlite.families.index import FAMILIES, known_architecture
from swiftlite.plan.facts import Facts, near_path
from swiftlite.plan.layout import layout_of, sequence_multiple
from swiftlite.plan.preference import SMOOTHED, preference_of, reference_layout
from swiftlite.rules import common
from swiftlite.rules.training import sft


def pairs_have_room(args: DpoArgs | RmArgs, facts: Facts) -> Iterator[Problem]:
    """Require packed rows that are long enough for both answers of a pair."""
    if not args.packing or out_of_bounds(args):
        return
    multiple = sequence_multiple(layout_of(args))
    longest = 2 * math.ceil(args.max_length / multiple) * multiple
    length = args.packing_length or args.max_length
    if length < longest:
        yield (
            f"a packed row of {length} tokens must hold two answers of --max_length {args.max_length}",
            f"use --packing_length {longest}",
        )


def reference_is_a_model(args: DpoArgs, facts: Facts) -> Iterator[Problem]:
    if args.ref_model is None:
        return
    directory, config = facts.described("ref_model")
    if not config:
        yield (
            f"--ref_model {args.ref_model} has no config.json",
            near_path(directory) or "give the directory of a Hugging Face model",
        )
    elif known_architecture(config) is None:
        yield (
            f"--ref_model {args.ref_model}: unknown model_type {config.get('model_type')}",
            f"known: {', '.join(FAMILIES)}",
        )
    elif facts.hf_config and config.get("vocab_size") != facts.hf_config.get("vocab_size"):
        yield (
            f"--ref_model {args.ref_model} has vocab_size {config.get('vocab_size')}, --model has "
            f"{facts.hf_config.get('vocab_size')}",
            "give a model with the same tokenizer",
        )


def cache_is_a_directory(args: DpoArgs, facts: Facts) -> Iterator[Problem]:
    if args.ref_logprobs_cache is not None and Path(args.ref_logprobs_cache).is_file():
        yield f"--ref_logprobs_cache {args.ref_logprobs_cache} is a file", "give a directory, which may be new"


def reference_fits_its_layout(args: DpoArgs, facts: Facts) -> Iterator[Problem]:
    if not out_of_bounds(args) and preference_of(args).needs_reference:
        yield from reference_problems(reference_layout(args), args, facts)


def reference_problems(layout: ParallelLayout, args: DpoArgs | GrpoArgs, facts: Facts) -> Iterator[Problem]:
    """Yield the problems of the reference model's layout that the trained model's layout does not have."""
    config = facts.hf_config
    if args.ref_model:
        _, config = facts.described("ref_model")
    for problem, hint in common.problems_beside("ref", layout, known_architecture(config), args, facts):
        yield f"the reference model: {problem}", hint


def without_reference(args: DpoArgs) -> dict[str, tuple[bool, str]]:
    """Return, for each option of the reference model, whether it has no effect, and the reason."""
    idle = (not preference_of(args).needs_reference, f"--loss_type {args.loss_type} has no reference model")
    names = ("ref_model", "ref_tensor_model_parallel_size", "ref_pipeline_model_parallel_size", "ref_logprobs_cache")
    return dict.fromkeys(names, idle)


def settings_have_an_effect(args: DpoArgs, facts: Facts) -> Iterator[str]:
    """Yield a note for each changed option that has no effect with this --loss_type."""
    loss = f"--loss_type is {args.loss_type}"
    not_simpo = (args.loss_type != "simpo", loss)
    idle = {
        "label_smoothing": (args.loss_type not in SMOOTHED, loss),
        "simpo_gamma": not_simpo,
        "cpo_alpha": not_simpo,
        "desirable_weight": (True, loss),
        "undesirable_weight": (True, loss),
    }
    yield from common.without_effect(args, without_reference(args) | idle)


SHARED = (*sft.RULES, reference_is_a_model, cache_is_a_directory, reference_fits_its_layout)
"""Rules of `megatron dpo` for every --loss_type."""
RULES = (*SHARED, pairs_have_room)
NOTES = (*sft.NOTES, settings_have_an_effect)
