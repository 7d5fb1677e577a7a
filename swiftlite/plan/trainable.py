"""Define which parameters of a model are trained, as one value with a description."""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from swiftlite.args.commands import SftArgs
from swiftlite.base.heads import MTP, Heads
from swiftlite.base.lora import Lora, is_adapter
from swiftlite.families.tower import FROZEN, TrainedParts
from swiftlite.families.vision import is_aligner_parameter, is_tower_parameter


@dataclass(frozen=True)
class Trainable:
    """A selection of trained parameters. All other parameters remain bitwise identical; a run verifies this with
    hashes.

    Attributes:
        learns: returns whether the parameter with a given name is trained. The name is megatron-core's name in its
            chunk of the model, such as "decoder.layers.0.mlp.linear_fc1.weight".
        words: description for the plan of a run.
        option: the option that selected the parameters, which errors name; empty if all parameters are trained.
        freezes_trunk: whether no gradients are computed in the trunk. False if parts of it are trained, such as
            adapters.
    """

    learns: Callable[[str], bool]
    words: str
    option: str = ""
    freezes_trunk: bool = False

    def apply(self, chunks: Iterable[Any]) -> None:
        """Disable gradients of all parameters that are not trained. Must be called before an optimizer is created.

        Args:
            chunks: the model without wrappers, whose parameters have the names for `learns`.
        """
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if not self.learns(name):
                    parameter.requires_grad_(False)


def is_indexer_parameter(name: str) -> bool:
    """Return whether a parameter belongs to an indexer of sparse attention."""
    return ".indexer." in name


def _but_indexers(name: str) -> bool:
    return not is_indexer_parameter(name)


def is_head_parameter(name: str) -> bool:
    """Return whether a parameter belongs to the MTP heads."""
    return name.startswith("mtp.")


def _heads_but_indexers(name: str) -> bool:
    return is_head_parameter(name) and not is_indexer_parameter(name)


WHOLE_MODEL = Trainable(_but_indexers, "the whole model")
JOINT = Trainable(_but_indexers, "trunk and MTP heads together")
HEADS_ONLY = Trainable(
    _heads_but_indexers, "only MTP heads, the trunk is frozen", "--mtp_mode heads_only", freezes_trunk=True
)


INDEXERS = Trainable(
    is_indexer_parameter, "only indexers, all else is frozen", "--indexer_mode indexer_only", freezes_trunk=True
)


def trainable_of(
    args: SftArgs,
    heads: Heads,
    lora: Lora | None = None,
    saved: Collection[str] = (),
    has_tower: bool = False,
) -> Trainable:
    """Return the parameters that the options train.

    Args:
        heads: heads of the run.
        lora: adapters of the run.
        saved: Megatron names of the trunk's parameters that are trained in full.
        has_tower: whether the run computes a tower, such as a vision tower.
    """
    if args.indexer_mode == "indexer_only":
        return INDEXERS
    chosen = _without_indexers(args, heads, lora, saved, has_tower)
    if args.indexer_mode == "frozen":
        return chosen

    def learns(name: str) -> bool:
        return chosen.learns(name.replace(".indexer.", "."))  # with the attention that it belongs to

    return replace(chosen, learns=learns, words=f"{chosen.words}, with their indexers")


def _without_indexers(
    args: SftArgs, heads: Heads, lora: Lora | None, saved: Collection[str], has_tower: bool
) -> Trainable:
    """Compute the result of `trainable_of` without regard to --indexer_mode."""
    if lora is not None:
        return _adapters(lora, heads, saved)
    if has_tower and args.mtp_mode != "heads_only":
        return _with_tower(args, heads)
    if not heads.layers:
        return WHOLE_MODEL
    if args.mtp_mode == "heads_only":
        if heads.kind == MTP:
            return HEADS_ONLY
        return replace(HEADS_ONLY, words=f"only {heads.name}, the trunk is frozen")
    return JOINT


def trained_parts_of(args: SftArgs) -> TrainedParts:
    """Return which parts of a vision tower the options train."""
    if args.mtp_mode == "heads_only" or args.tuner_type == "lora":
        return FROZEN
    return TrainedParts(vit=not args.freeze_vit, aligner=not args.freeze_aligner)


def _with_tower(args: SftArgs, heads: Heads) -> Trainable:
    """Return the parts of a vision-language model that the options do not freeze."""
    learns_of_part = {
        "vision tower": not args.freeze_vit,
        "aligner": not args.freeze_aligner,
        "trunk": not args.freeze_llm,
        "MTP heads": True,
    }

    def learns(name: str) -> bool:
        return learns_of_part[_part(name)]

    parts = [part for part in learns_of_part if heads.layers or part != "MTP heads"]
    learned = [part for part in parts if learns_of_part[part]]
    frozen = [part for part in parts if not learns_of_part[part]]
    words = ", ".join(learned)
    if frozen:
        words += f"; frozen: {', '.join(frozen)}"
    return Trainable(learns, words, "--freeze_vit, --freeze_aligner and --freeze_llm", learned == ["MTP heads"])


def _part(name: str) -> str:
    """Return the part of a vision-language model that a parameter belongs to."""
    if is_aligner_parameter(name):
        return "aligner"
    if is_tower_parameter(name):
        return "vision tower"
    if is_head_parameter(name):
        return "MTP heads"
    return "trunk"


def _adapters(lora: Lora, heads: Heads, saved: Collection[str]) -> Trainable:
    layer_patterns = {numberless(name) for name in saved}
    learns_in_heads = lora.heads == "full"

    def learns(name: str) -> bool:
        if is_adapter(name) or numberless(name) in layer_patterns:
            return True
        return learns_in_heads and _heads_but_indexers(name)

    return Trainable(learns, _words(lora, heads), "--tuner_type lora", freezes_trunk=not lora.on_trunk)


def _words(lora: Lora, heads: Heads) -> str:
    """Return the description of the trained parameters for the plan."""
    adapters = f"adapters of rank {lora.rank} on {', '.join(lora.targets)}"
    if not lora.on_trunk:
        adapters += ", only in the MTP heads"
    descriptions = {"full": "MTP heads in full", "lora": "adapters in the MTP heads", "frozen": "MTP heads frozen"}
    words = [adapters]
    if lora.saved:
        words.append(f"{', '.join(lora.saved)} in full")
    if heads.layers and lora.on_trunk:
        words.append(descriptions[lora.heads])
    return "; ".join(words)


def numberless(name: str) -> str:
    """Return the name without layer numbers. Layer numbers start at 0 in each chunk."""
    return re.sub(r"\.\d+\.", ".#.", name)
