"""Rules of `megatron sft` for adapters."""

from collections.abc import Iterator
from itertools import chain

from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem
from swiftlite.args.docs import options
from swiftlite.args.fields import LoraArgs
from swiftlite.base.lora import ALL_LINEAR, is_named
from swiftlite.bridge.adapters.rows import is_linear, leaf_of, module_of, modules_of
from swiftlite.bridge.rows import Row, shapes_of
from swiftlite.families.index import find
from swiftlite.plan.facts import Facts
from swiftlite.plan.heads import heads_of, heads_tuner_of, mtp_init_of
from swiftlite.plan.trainable import numberless
from swiftlite.rules import common


def lora_options_have_adapters(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.tuner_type == "lora":
        return
    given = [f"--{name}" for name in common.changed(args, options(LoraArgs)) if name != "tuner_type"]
    if given:
        yield f"{', '.join(given)} requires --tuner_type lora", "add --tuner_type lora"


def target_modules_are_layers(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    rows = _rows(args, facts)
    if args.tuner_type != "lora" or not rows:
        return
    if not args.target_modules:
        yield "--target_modules is empty", "remove it for all-linear"
    linear = list(map(module_of, shapes_of(filter(is_linear, rows))))
    known = ", ".join(sorted({leaf_of(module) for module in linear}))
    for name in args.target_modules:
        if name == ALL_LINEAR or any(is_named(module, (name,)) for module in linear):
            continue
        if name in ("lm_head", "embed_tokens"):
            hint = f"use --lora_modules_to_save {name} to train it in full"
        else:
            hint = f"use all-linear, or linear layers of this model: {known}"
        yield f"--target_modules {name}: unknown linear layer", hint


def modules_to_save_are_whole(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    rows = _rows(args, facts)
    if args.tuner_type != "lora" or not rows:
        return
    trunk = [row for row in rows if not (row.mcore.startswith("mtp.") or row.is_frozen)]
    modules = chain.from_iterable(modules_of(row) for row in trunk if not is_linear(row))
    known = sorted(set(map(leaf_of, modules)))
    for name in args.lora_modules_to_save:
        found = [row for row in trunk if any(is_named(module, (name,)) for module in modules_of(row))]
        if not found:
            yield f"--lora_modules_to_save {name}: unknown module of the trunk", f"known: {', '.join(known)}"
        elif any(is_linear(row) for row in found):
            yield (
                f"--lora_modules_to_save {name} is a linear layer of a decoder layer, which only supports an adapter",
                f"use --target_modules {name}; modules to train in full: {', '.join(known)}",
            )
        elif len(found) < len(_alike(found, trunk)):
            yield (
                f"--lora_modules_to_save {name} must include the module in all layers",
                f"use --lora_modules_to_save {name.rpartition('.')[2]}",
            )


def rank_is_low(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    hidden = facts.hf_config.get("hidden_size")
    if args.tuner_type == "lora" and isinstance(hidden, int) and args.lora_rank > hidden:
        yield (
            f"--lora_rank {args.lora_rank} must not exceed the model's hidden_size {hidden}",
            "use a smaller rank, or --tuner_type full",
        )


def heads_and_adapters_go_together(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.tuner_type != "lora" or not facts.hf_config or not heads_of(args, facts.heads).layers:
        return
    if args.draft_vocab:
        yield (
            f"--draft_vocab {args.draft_vocab} does not support --tuner_type lora",
            "remove it; or train heads first, without --tuner_type: swiftlite megatron sft --mtp_mode heads_only",
        )
        return
    tuner = heads_tuner_of(args, facts.heads)
    has_new_heads = mtp_init_of(args, facts.heads) not in ("checkpoint", "graft")
    if has_new_heads and tuner != "full":
        yield (
            f"--mtp_tuner {tuner} does not support new heads, which must first be trained in full",
            "remove --mtp_tuner, or train heads first: swiftlite megatron sft --tuner_type full --mtp_mode heads_only",
        )
    elif args.mtp_mode == "heads_only" and tuner != "lora":
        hint = "add --mtp_tuner lora"
        if tuner == "full":
            hint = "remove --tuner_type"
        yield f"--mtp_mode heads_only with --tuner_type lora requires --mtp_tuner lora, not {tuner}", hint
    elif args.mtp_mode == "heads_only" and args.lora_modules_to_save:
        problem = "--lora_modules_to_save names modules of the trunk, which --mtp_mode heads_only freezes"
        yield problem, "remove one of the two"


def _alike(some: list[Row], rows: list[Row]) -> list[Row]:
    """Return the bridge rows in `rows`, of any layer, with the same module name (such as q_proj) as a row in `some`."""
    kinds = {numberless(row.mcore) for row in some}
    return [row for row in rows if numberless(row.mcore) in kinds]


def _rows(args: SftArgs, facts: Facts) -> list[Row]:
    """Return the bridge rows of the run's model; empty if the model cannot be read, which another rule reports."""
    family = find(facts.hf_config)
    if family is None or facts.architecture is None:
        return []
    return family.rows(facts.hf_config, heads_of(args, facts.heads).layers)
