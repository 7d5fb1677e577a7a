"""Describe models with sliding windows.

In Mistral and Phi-3, all layers have the same window (`common_window`). The other functions describe models in which
layers with a sliding window alternate with layers that see all tokens. Both kinds of layers have their own rotary
embedding. transformers 5 writes its settings into `rope_parameters`, by the kind of layer. Older files have one setting
for each key, with names that depend on the family.
"""

from collections.abc import Mapping
from typing import Any

from swiftlite.families import dense
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.family import HfConfig
from swiftlite.families.layer_types import FULL, KINDS, WINDOW, layer_types
from swiftlite.families.rope import ROPE_KEYS

Bases = Mapping[str, tuple[str | None, float | None]]
"""By the kind of layer: the key of old files with the base of its rotary angles, and the base without this key."""


def common_window(hf_config: HfConfig, default: int | None = None) -> int | None:
    """Return the window of all layers in tokens; None if a token sees all tokens before it.

    A window that contains all positions of the model is not a window.

    Args:
        default: value of transformers for a config without `sliding_window`.
    """
    window = hf_config.get("sliding_window", default)
    if window is None or window >= hf_config["max_position_embeddings"]:
        return None
    return window


def common_window_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem (one line) if `sliding_window` is not a positive integer or null."""
    window = hf_config.get("sliding_window")
    if window is None or (isinstance(window, int) and window > 0):
        return []
    return [f"sliding_window {window!r} is not supported; it can only be null or positive"]


def problems_of(
    hf_config: HfConfig, bases: Bases, interval: int, *, takes_proportional: bool = False, **neutral: tuple[Any, ...]
) -> list[str]:
    """Return a problem (one line) for every setting that is invalid, or changes the computation and is not supported.

    Args:
        bases, interval: as in `rope` and `layer_types`.
        takes_proportional: whether rotary embeddings can have the type `proportional`, in which angles of a part of
            the head are 0.
        neutral: as in `dense.problems_of`.
    """
    rope_parameters = hf_config.get("rope_parameters")
    is_nested = rope_parameters is None or any(kind in rope_parameters for kind in KINDS)
    # `dense` checks the settings of a model with one kind of rotary embedding. Those of each kind are checked below.
    flat = {key: value for key, value in hf_config.items() if key != "rope_parameters"}
    problems = dense.missing_numbers(hf_config, ["sliding_window"])
    problems += dense.problems_of(flat, layer_types=KINDS, **neutral)
    if not is_nested:
        problems.append(f"rope_parameters has settings for neither {' nor '.join(map(repr, KINDS))}")
    elif rope_parameters is not None:
        if other := sorted(rope_parameters.keys() - set(KINDS)):
            problems.append(f"rope_parameters has {other[0]!r}, in addition to the settings of each kind of layer")
        problems += [
            f"rope_parameters: {kind} {rope_parameters[kind]!r} is not an object"
            for kind in KINDS
            if not isinstance(rope_parameters.get(kind) or {}, dict)
        ]
    for kind in KINDS if not problems else ():
        settings = rope(hf_config, kind, bases)["rope_parameters"]
        factor = settings.get("partial_rotary_factor")
        is_proportional = takes_proportional and settings["rope_type"] == "proportional"
        if factor not in (1, None) and not is_proportional:
            problems.append(f"rope_parameters: partial_rotary_factor {factor} is not supported; it can only be 1")
    if not problems:
        if FULL not in layer_types(hf_config, interval):
            problems.append(f"layer_types has no {FULL!r}, the attention of the MTP heads")
        if hf_config["sliding_window"] < 1:
            problems.append(f"sliding_window {hf_config['sliding_window']} is not positive")
    return problems


def rope(hf_config: HfConfig, kind: str, bases: Bases) -> dict[str, Any]:
    """Return the rotary settings of a kind of layer, with the names of other families."""
    settings: dict[str, Any] = {"rope_type": "default"}
    settings |= (hf_config.get("rope_parameters") or {}).get(kind) or {}
    if kind == FULL:
        settings |= hf_config.get("rope_scaling") or {}
    key, default = bases[kind]
    settings.setdefault("rope_theta", hf_config.get(key, default) if key else default)
    sizes = {key: hf_config[key] for key in ROPE_KEYS if key in hf_config and not key.startswith("rope_")}
    return sizes | {"rope_parameters": settings}


def attention(hf_config: HfConfig, number: int, interval: int) -> GroupedQueryAttention:
    """Return the attention of decoder layer `number` (from 0), with norms of queries and keys.

    The rotary embeddings of `Outside.ropes` are in the order of `KINDS`.
    """
    kind = layer_types(hf_config, interval)[number]
    return dense.attention(
        hf_config,
        qk_norm=True,
        window=hf_config["sliding_window"] if kind == WINDOW else None,
        rope=int(kind == FULL),  # index in KINDS
    )
