"""A list of all quantized formats, by `Quantization.method`."""

from collections.abc import Callable, Mapping
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.bridge.encoding.compressed_tensors import CompressedTensors
from swiftlite.bridge.encoding.encoding import Format
from swiftlite.bridge.encoding.fp8 import Fp8
from swiftlite.bridge.encoding.gptq_awq import TransposedWords
from swiftlite.bridge.encoding.modelopt import ModelOpt
from swiftlite.bridge.encoding.mxfp4 import Mxfp4
from swiftlite.bridge.encoding.quantization import Quantization, quantization_problem
from swiftlite.bridge.rows import HfConfig

FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": TransposedWords.declared_awq,
    "compressed-tensors": CompressedTensors.declared,
    "fp8": Fp8.declared,
    "gptq": TransposedWords.declared_gptq,
    "modelopt": ModelOpt.declared,
    "mxfp4": Mxfp4.declared,
}
"""Functions that create a format from a quantization_config that `quantization.CHECKS` accepts."""


def format_of(hf_config: HfConfig) -> Format | None:
    """Return the format that a config.json declares; None for a checkpoint that is not quantized.

    Raises:
        UserError: the format is not supported.
    """
    # An unknown method must not pass as plain: its codes would be read as weights.
    if problem := quantization_problem(hf_config):
        raise UserError(f"config.json: {problem}", "use the model before its quantization")
    quantization = Quantization.of(hf_config)
    if quantization is None:
        return None
    return FORMATS[quantization.method](quantization.content)
