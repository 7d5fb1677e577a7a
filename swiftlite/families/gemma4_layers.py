"""Read from the config.json of a Gemma 4 how its layers differ, for the family and for its assistants."""

from collections.abc import Sequence
from typing import Any

from swiftlite.bridge.rows import HfConfig
from swiftlite.families.layer_types import layer_types

INTERVAL = 6


def kinds_of_layers(hf_config: HfConfig) -> Sequence[str]:
    """Return the kind of each layer."""
    return layer_types(hf_config, INTERVAL)


def key_layers(hf_config: HfConfig) -> list[int]:
    """Return, for each layer, the number of the layer whose keys and values it reads: its own, or for the last
    `num_kv_shared_layers` layers that of the last layer of the same kind before them."""
    kinds, numbers = kinds_of_layers(hf_config), list[int]()
    first_shared = len(kinds) - (hf_config.get("num_kv_shared_layers") or 0)
    own: dict[str, int] = {}
    for number, kind in enumerate(kinds):
        if number < first_shared:
            own[kind] = number
        numbers.append(own.get(kind, number))
    return numbers


def of_full_layers(hf_config: HfConfig) -> dict[str, Any]:
    """Return settings of layers with full attention that differ from those at the top level.

    transformers since 5.19 writes `per_layer_config` instead of the keys of published files.
    """
    stated = hf_config.get("per_layer_config")
    if isinstance(stated, dict):
        own = next(iter(stated.values()), None)
        return own if isinstance(own, dict) else {}
    found = {"head_dim": hf_config.get("global_head_dim")}
    if hf_config.get("attention_k_eq_v"):
        found["num_key_value_heads"] = hf_config.get("num_global_key_value_heads")
    return {key: value for key, value in found.items() if value is not None}
