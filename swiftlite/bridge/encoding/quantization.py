"""Check whether the quantization format in a config.json is supported. This module does not import torch."""

from collections.abc import Callable, Mapping
from typing import Any

from swiftlite.bridge.rows import HfConfig

# Keys of quantization_config that do not affect reading weights: the treatment of activations while serving, and
# modules that are not quantized, which are recognized by their tensors.
_HARMLESS = {"activation_scheme", "scale_fmt", "modules_to_not_convert", "ignored_layers", "ignore"}
_DEFINING = {"quant_method": "fp8", "fmt": "e4m3"}
_ONLY = "only fp8 (e4m3) with weight_block_size, as in DeepSeek-V3, is supported"


def quantization_problem(hf_config: HfConfig) -> str:
    """Return why the quantization_config of a config.json is not supported; empty if it is supported or missing."""
    quantization = hf_config.get("quantization_config")
    if quantization is None:
        return ""
    if not isinstance(quantization, dict):
        return f"quantization_config {quantization!r} is not supported; {_ONLY}"
    # For an unknown method, the check of FP8 reports the differences.
    return CHECKS.get(str(quantization.get("quant_method")), _fp8_problem)(quantization)


def _fp8_problem(quantization: Mapping[str, Any]) -> str:
    wrong = {
        key: value
        for key, value in quantization.items()
        if key not in _HARMLESS and key != "weight_block_size" and _DEFINING.get(key) != value
    }
    if wrong or "quant_method" not in quantization:
        return f"quantization_config {wrong or quantization} is not supported; {_ONLY}"
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        return f"quantization_config: weight_block_size {block!r} is not supported; {_ONLY}"
    return ""


CHECKS: dict[str, Callable[[Mapping[str, Any]], str]] = {"fp8": _fp8_problem}
"""By `quant_method`, a function that returns why a quantization_config is not supported; empty if it is supported."""
