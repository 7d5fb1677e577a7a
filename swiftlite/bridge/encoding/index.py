"""A list of all encodings, by the `quant_method` of config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from swiftlite.bridge.encoding.encoding import DeclaredEncoding
from swiftlite.bridge.encoding.fp8 import Fp8Blocks
from swiftlite.bridge.encoding.quantization import quantization_problem
from swiftlite.bridge.rows import HfConfig
from swiftlite.errors import UserError

ENCODINGS: dict[str, Callable[[Mapping[str, Any]], DeclaredEncoding]] = {
    "fp8": Fp8Blocks.declared,
}
"""Functions that create an encoding from a quantization_config that `quantization.CHECKS` accepts."""


def encoding_of(hf_config: HfConfig) -> DeclaredEncoding | None:
    """Return the encoding that a config.json declares; None for a checkpoint that is not quantized.

    Raises:
        UserError: the encoding is not supported.
    """
    if problem := quantization_problem(hf_config):
        raise UserError(f"config.json: {problem}", "use the model before its quantization")
    quantization = hf_config.get("quantization_config")
    if not quantization:
        return None
    return ENCODINGS[quantization["quant_method"]](quantization)
