"""List the kinds of drafters: modules that draft tokens from the states of the trunk.

The drafter of a model is MTP heads, unless its config.json declares another kind. `Heads` describes a drafter of any
kind. At each position s, a drafter computes `Heads.drafts` states, of which state k (from 1) predicts token s + k + 1.
Labels, losses, metrics and acceptance depend only on these states. `model/specs.py` has the module of each kind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swiftlite.base.drafting import Drafting
from swiftlite.base.errors import clip
from swiftlite.base.heads import DRAFTER_KEY, MTP
from swiftlite.bridge.rows import HfConfig, Row, lift

if TYPE_CHECKING:
    from swiftlite.families.family import Family

MAX_LAYERS = 100
"""Maximum number of layers, as for MTP heads."""


def no_copies(family: "Family", hf_config: HfConfig, layer: int) -> dict[str, str]:
    """Return an empty mapping, for drafters whose layers contain no copies of the trunk's tensors."""
    return {}


def no_config(family: "Family", hf_config: HfConfig, layers: int) -> dict[str, Any]:
    """Return an empty mapping, for drafters that are declared only by `Heads`."""
    return {}


def state_after_norm(family: "Family") -> Drafting:
    """Return the inputs of drafters that read the trunk's state after its final norm."""
    return Drafting()


@dataclass(frozen=True)
class Drafter:
    """A kind of drafter.

    It consists of `Heads.layers` layers, numbered from 0. The first arguments of all functions are the family of the
    trunk and the content of config.json, whose object DRAFTER_KEY can have further settings of the kind.

    Args:
        rows: returns the bridge rows of layer k. Megatron names start with `mtp.layers.{k}.`.
        layer_of: returns the number of the layer that an HF key belongs to; None for keys of the trunk.
        copies: returns the HF keys of layer k that copy a tensor of the trunk, each with the trunk's key.
        config: returns further keys of config.json for a number of layers.
        drafting: returns which of the trunk's states the layers read, if `Heads.drafting` is None. The argument is the
            family.
    """

    rows: Callable[["Family", HfConfig, int], list[Row]]
    layer_of: Callable[["Family", HfConfig, str], int | None]
    copies: Callable[["Family", HfConfig, int], dict[str, str]] = no_copies
    config: Callable[["Family", HfConfig, int], dict[str, Any]] = no_config
    drafting: Callable[["Family"], Drafting] = state_after_norm


def _rows_of_head(family: "Family", hf_config: HfConfig, head: int) -> list[Row]:
    prefix = f"mtp.layers.{head}.transformer_layer."
    block = lift(family.block_rows(hf_config), prefix, family.mtp.block(hf_config, head))
    return family.mtp.frame_rows(hf_config, head) + block


DRAFTERS: dict[str, Drafter] = {
    MTP: Drafter(
        rows=_rows_of_head,
        layer_of=lambda family, hf_config, hf_key: family.mtp.head_of(hf_config, hf_key),
        copies=lambda family, hf_config, head: family.mtp.copies(hf_config, head),
        config=lambda family, hf_config, heads: family.mtp.config(hf_config, heads),
        drafting=lambda family: family.mtp.drafting,
    ),
}


def drafter_problems(hf_config: Mapping[str, Any]) -> list[str]:
    """Return a problem (one line) for every invalid value in the declaration of a drafter."""
    declared = hf_config.get(DRAFTER_KEY)
    if declared is None:
        return []
    if not isinstance(declared, dict):
        return [f"{DRAFTER_KEY} {clip(repr(declared), 80)} is not an object"]
    problems = []
    kind, layers = declared.get("kind"), declared.get("layers")
    if not isinstance(kind, str) or kind not in DRAFTERS:
        problems.append(f"{DRAFTER_KEY}: kind {clip(repr(kind), 80)} is unknown; known: {', '.join(sorted(DRAFTERS))}")
    if type(layers) is not int or not 0 <= layers <= MAX_LAYERS:
        shown = clip(repr(layers), 80)
        problems.append(f"{DRAFTER_KEY}: layers {shown} is not an integer from 0 to {MAX_LAYERS}")
    return problems
