"""List the kinds of drafters, by the `kind` that config.json declares. If it declares none, the kind is MTP heads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from swiftlite.base.errors import clip
from swiftlite.base.heads import DRAFTER_KEY, FEATURES_KEY, GEMMA4_ASSISTANTS, MTP, OWN_CONFIG_KEY
from swiftlite.bridge.rows import HfConfig, Row, lift
from swiftlite.families import dflash, eagle3, gemma4_assistant, mtp_features
from swiftlite.families.drafter import Drafter, sources_of_head

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
        sources=sources_of_head,
        layer_of=lambda family, hf_config, hf_key: family.mtp.head_of(hf_config, hf_key),
        copies=lambda family, hf_config, head: family.mtp.copies(hf_config, head),
        config=lambda family, hf_config, layers: family.mtp.config(hf_config, layers),
        drafting=lambda family, hf_config: family.mtp.drafting,
        is_fitted=True,
    ),
    eagle3.KIND: eagle3.EAGLE3,
    **dict.fromkeys(dflash.KINDS, dflash.DFLASH),
    mtp_features.KIND: mtp_features.FEATURE_HEAD,
    gemma4_assistant.KIND: gemma4_assistant.ASSISTANT,
}

_PUBLISHED = dict.fromkeys(GEMMA4_ASSISTANTS, gemma4_assistant.ASSISTANT)
"""Drafters with a function `published`, by the `model_type` of the config.json in a directory of their own."""

SERVED = (MTP, *(kind for kind, drafter in DRAFTERS.items() if drafter.own_config))
"""The kinds with which vLLM and transformers draft."""

BLOCKS = tuple(kind for kind, drafter in DRAFTERS.items() if drafter.is_block)
"""The kinds of block drafters."""

NEW: dict[str, Callable[[HfConfig], dict[str, Any]]] = {
    "eagle3": partial(eagle3.declaration, is_normed=False),
    "eagle3.1": partial(eagle3.declaration, is_normed=True),
    **{kind: partial(dflash.declaration, kind=kind) for kind in dflash.KINDS},
    gemma4_assistant.KIND: gemma4_assistant.declaration,
}
"""The values of --drafter, each with a function that returns what config.json declares for it, without layers."""


def is_published(own_config: HfConfig) -> bool:
    """Return whether a config.json is that of a drafter that is published in a directory of its own."""
    model_type = own_config.get("model_type")
    return isinstance(model_type, str) and model_type in _PUBLISHED


@dataclass(frozen=True)
class DrafterOptions:
    """The options of a run that declare a drafter.

    Attributes:
        drafter: a name in `NEW`; None for MTP heads or the drafter of the checkpoint.
        drafter_layers: number of decoder layers of a block drafter; None: that of config.json, or 1.
        mtp_features: numbers of the layers whose inputs an MTP head reads; numbers that a rule reports change nothing.
        markov_rank: rank of the Markov head of a DSpark drafter; None: that of config.json, or the default.
        own: content of the files of a drafter that is published in a directory of its own (`own_settings_of`); None
            without one.
    """

    drafter: str | None = None
    drafter_layers: int | None = None
    mtp_features: Sequence[int] = ()
    markov_rank: int | None = None
    own: HfConfig | None = None

    @classmethod
    def of(cls, args: Any, own: HfConfig | None = None) -> "DrafterOptions":
        """Return the options of a training command."""
        return cls(args.drafter, args.drafter_layers, args.mtp_features or (), args.markov_rank, own)


def with_drafter(hf_config: HfConfig, options: DrafterOptions) -> dict[str, Any]:
    """Return a config.json that declares a drafter of NEW, or an MTP head with features, without layers, so that a run
    creates them; or a published drafter (`own`) with its layers. If it already declares this drafter, or none is given,
    nothing changes.
    """
    sizes = (hf_config.get("num_hidden_layers"), hf_config.get("vocab_size"))
    if not all(isinstance(size, int) for size in sizes):  # which a rule reports
        return dict(hf_config)
    if options.own is not None:
        published = _PUBLISHED[options.own[OWN_CONFIG_KEY]["model_type"]].published
        assert published is not None
        return {**hf_config, DRAFTER_KEY: published(options.own, hf_config)}
    features = options.mtp_features
    if options.drafter is not None:
        new = NEW[options.drafter](hf_config)
    elif features and 0 not in features and are_features([*features], sizes[0]):
        new = mtp_features.declaration(features)
    else:
        return dict(hf_config)
    declared = hf_config.get(DRAFTER_KEY)
    if not isinstance(declared, dict):
        declared = {}
    if declared.get("kind") == new["kind"] and new["kind"] in BLOCKS:
        new |= {key: declared[key] for key in dflash.SETTINGS if key in declared}
    # A rule reports options of other kinds, and numbers out of bounds.
    if new["kind"] in BLOCKS and options.drafter_layers in range(1, dflash.MAX_DECODER_LAYERS + 1):
        new[dflash.LAYERS_KEY] = options.drafter_layers
    if new["kind"] == dflash.DSPARK and options.markov_rank in range(1, dflash.MAX_MARKOV_RANK + 1):
        new[dflash.MARKOV_KEY] = options.markov_rank
    if {**declared, "layers": 0} == new:
        return dict(hf_config)
    return {**hf_config, DRAFTER_KEY: new}


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
    else:
        problems += [f"{DRAFTER_KEY}: {problem}" for problem in DRAFTERS[kind].problems(hf_config)]
    if type(layers) is not int or not 0 <= layers <= MAX_LAYERS:
        shown = clip(repr(layers), 80)
        problems.append(f"{DRAFTER_KEY}: layers {shown} is not an integer from 0 to {MAX_LAYERS}")
    if not are_features(declared.get(FEATURES_KEY, []), hf_config.get("num_hidden_layers")):
        shown = clip(repr(declared[FEATURES_KEY]), 80)
        problems.append(f"{DRAFTER_KEY}: {FEATURES_KEY} {shown} is not an ascending list of numbers of decoder layers")
    return problems


def are_features(given: Any, num_layers: Any) -> bool:
    """Return whether a value can be `Heads.features`."""
    if not isinstance(given, list) or not all(type(layer) is int for layer in given):
        return False
    bounded = [-1, *given]
    if isinstance(num_layers, int):  # otherwise it is reported elsewhere
        bounded.append(num_layers)
    return all(before < after for before, after in pairwise(bounded))
