"""Rules of `megatron sft` for adapters."""

from collections.abc import Iterator
from itertools import chain

from swiftlite.args.commands import DoctorArgs, SftArgs
from swiftlite.args.config import Problem
from swiftlite.bridge.adapters.rows import is_linear, leaf_of, module_of, modules_of
from swiftlite.bridge.rows import Row, shapes_of
from swiftlite.families.index import FAMILIES
from swiftlite.lora import ALL_LINEAR, is_named
from swiftlite.plan.facts import Facts
from swiftlite.plan.heads import heads_of, heads_tuner_of, mtp_init_of
from swiftlite.plan.trainable import numberless
from swiftlite.rules import common

_OPTIONS = (
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "lora_modules_to_save",
    "use_rslora",
    "use_dora",
    "mtp_tuner",
)


def lora_options_have_adapters(args: SftArgs | DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.tuner_type == "lora":
        return
    known = [name for name in _OPTIONS if hasattr(args, name)]
    given = [f"--{name}" for name in common.changed(args, known)]
    if given:
        yield f"{', '.join(given)} without adapters: --tuner_type is full", "add --tuner_type lora"


def target_modules_are_layers(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    rows = _rows(args, facts)
    if args.tuner_type != "lora" or not rows:
        return
    if not args.target_modules:
        yield "--target_modules names no layer", "leave it out, which is all-linear"
    linear = list(map(module_of, shapes_of(filter(is_linear, rows))))
    known = ", ".join(sorted({leaf_of(module) for module in linear}))
    for name in args.target_modules:
        if name == ALL_LINEAR or any(is_named(module, (name,)) for module in linear):
            continue
        if name in ("lm_head", "embed_tokens"):
            hint = f"--lora_modules_to_save {name} trains it in full"
        else:
            hint = f"linear layers of this model: {known}; or all-linear"
        yield f"--target_modules {name}: no linear layer that gets adapters has this name", hint


def modules_to_save_are_whole(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    rows = _rows(args, facts)
    if args.tuner_type != "lora" or not rows:
        return
    trunk = [row for row in rows if not row.mcore.startswith("mtp.")]
    modules = chain.from_iterable(modules_of(row) for row in trunk if not is_linear(row))
    known = sorted(set(map(leaf_of, modules)))
    for name in args.lora_modules_to_save:
        found = [row for row in trunk if any(is_named(module, (name,)) for module in modules_of(row))]
        if not found:
            yield f"--lora_modules_to_save {name}: no module of the trunk has this name", f"known: {', '.join(known)}"
        elif any(is_linear(row) for row in found):
            yield (
                f"--lora_modules_to_save {name} is a linear layer inside a decoder layer, which gets an adapter",
                f"--target_modules {name}; in full learn: {', '.join(known)}",
            )
        elif len(found) < len(_alike(found, trunk)):
            yield (
                f"--lora_modules_to_save {name} is of some layers alone",
                f"name it without the layer: {name.rpartition('.')[2]}",
            )


def rank_is_low(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    hidden = facts.hf_config.get("hidden_size")
    if args.tuner_type == "lora" and isinstance(hidden, int) and args.lora_rank > hidden:
        yield (
            f"--lora_rank {args.lora_rank} is above the model's hidden_size {hidden}: that is no low rank",
            "--tuner_type full trains the matrices themselves",
        )


def heads_and_adapters_go_together(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.tuner_type != "lora" or not facts.hf_config or not heads_of(args, facts.heads).layers:
        return
    if args.draft_vocab:
        yield (
            f"--draft_vocab {args.draft_vocab} is for heads that learn in full, behind a trunk that stays",
            "leave it out; or train heads first, without --tuner_type: swiftlite megatron sft --mtp_mode heads_only",
        )
        return
    tuner = heads_tuner_of(args, facts.heads)
    starts_anew = mtp_init_of(args, facts.heads) not in ("checkpoint", "graft")
    if starts_anew and tuner != "full":
        yield (
            f"--mtp_tuner {tuner} with heads that start anew: they have to learn in full first",
            "leave --mtp_tuner out, or train heads first: --tuner_type full --mtp_mode heads_only",
        )
    elif args.mtp_mode == "heads_only" and tuner != "lora":
        yield (
            f"--mtp_mode heads_only leaves no adapter to learn where --mtp_tuner is {tuner}",
            "leave --tuner_type out" if tuner == "full" else "add --mtp_tuner lora",
        )
    elif args.mtp_mode == "heads_only" and args.lora_modules_to_save:
        yield "--lora_modules_to_save are modules of the trunk, which --mtp_mode heads_only keeps", "leave one out"


def _alike(some: list[Row], rows: list[Row]) -> list[Row]:
    """Return the rows of the same modules in all layers."""
    kinds = {numberless(row.mcore) for row in some}
    return [row for row in rows if numberless(row.mcore) in kinds]


def _rows(args: SftArgs, facts: Facts) -> list[Row]:
    """Return the rows of the run's model; [] if the model cannot be read, which another rule reports."""
    family = FAMILIES.get(str(facts.hf_config.get("model_type")))
    if family is None or facts.architecture is None:
        return []
    return family.rows(facts.hf_config, heads_of(args, facts.heads).layers)
