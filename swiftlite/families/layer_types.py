"""Read the kinds of layers from config.json, if layers with a sliding window alternate with layers that see all tokens.

Drafters use this module as well, so it imports no families.
"""

from collections.abc import Sequence

from swiftlite.bridge.rows import HfConfig

WINDOW, FULL = "sliding_attention", "full_attention"
KINDS = (WINDOW, FULL)


def layer_types(hf_config: HfConfig, interval: int) -> Sequence[str]:
    """Return the kind of each layer. By default, every `interval`-th layer has full attention."""
    stated = hf_config.get("layer_types")
    if isinstance(stated, list):
        return stated
    numbers = range(1, hf_config["num_hidden_layers"] + 1)
    return [WINDOW if number % interval else FULL for number in numbers]
