"""Copy and restore states of linear attention in the cache of transformers. Such states cannot be truncated."""

from copy import copy
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin


class RecurrentStates:
    """A copy of the states of a cache's linear layers, to be restored later.

    Attributes:
        layers: the linear layers; empty for a model without linear attention.
    """

    def __init__(self, cache: DynamicCache):
        self.layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self._kept = [(_copy(layer.conv_states), _copy(layer.recurrent_states)) for layer in self.layers]

    def restore(self) -> None:
        """Restore the copied states."""
        for layer, (conv_states, recurrent_states) in zip(self.layers, self._kept, strict=True):
            for number in conv_states:
                layer.conv_states[number].copy_(conv_states[number])
                layer.recurrent_states[number].copy_(recurrent_states[number])


def whole_cache(config: Any) -> DynamicCache:
    """Return a cache that keeps all keys, also of layers with a sliding window, so that drafts can be removed."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None and getattr(config, "sliding_window", None) is not None:
        kinds = ["sliding_attention"] * config.num_hidden_layers
    if kinds is not None:
        # A copy, because the model's own masks depend on these kinds.
        config = copy(config)
        config.layer_types = ["full_attention" if kind == "sliding_attention" else kind for kind in kinds]
    return DynamicCache(config=config)


def crop_keys(cache: DynamicCache, number: int) -> None:
    """Remove the last `number` tokens from the layers with a KV cache."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            layer.crop(-number)


def _copy(states: dict[int, Any]) -> dict[int, Any]:
    return {number: state.clone() for number, state in states.items() if state is not None}
