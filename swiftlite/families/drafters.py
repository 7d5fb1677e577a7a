"""List the kinds of drafters, by the `kind` that config.json declares. If it declares none, the kind is MTP heads."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swiftlite.base.errors import clip
from swiftlite.base.heads import DRAFTER_KEY, MTP
from swiftlite.bridge.rows import HfConfig, Row, lift
from swiftlite.families.drafter import Drafter

if TYPE_CHECKING:
    from swiftlite.families.family import Family

MAX_LAYERS = 100
"""Maximum number of layers, as for MTP heads."""


def _rows_of_head(family: "Family", hf_config: HfConfig, head: int) -> list[Row]:
    prefix = f"mtp.layers.{head}.transformer_layer."
    block = lift(family.block_rows(hf_config), prefix, family.mtp.block(hf_config, head))
    return family.mtp.frame_rows(hf_config, head) + block


DRAFTERS: dict[str, Drafter] = {
    MTP: Drafter(
        rows=_rows_of_head,
        layer_of=lambda family, hf_config, hf_key: family.mtp.head_of(hf_config, hf_key),
        copies=lambda family, hf_config, head: family.mtp.copies(hf_config, head),
        config=lambda family, hf_config, layers: family.mtp.config(hf_config, layers),
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
    if kind == MTP:  # `layers` would be ignored
        problems.append(f"{DRAFTER_KEY}: kind {MTP!r} is not declared here, but by the number of MTP layers")
    elif not isinstance(kind, str) or kind not in DRAFTERS:
        problems.append(f"{DRAFTER_KEY}: kind {clip(repr(kind), 80)} is unknown; known: {', '.join(sorted(DRAFTERS))}")
    if type(layers) is not int or not 0 <= layers <= MAX_LAYERS:
        shown = clip(repr(layers), 80)
        problems.append(f"{DRAFTER_KEY}: layers {shown} is not an integer from 0 to {MAX_LAYERS}")
    return problems
