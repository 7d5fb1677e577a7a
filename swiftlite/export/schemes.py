"""Quantization schemes of `export --quant_method`: what config.json declares, and how a matrix is stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from swiftlite.args.commands import ExportArgs
from swiftlite.bridge.encoding.compressed_tensors import WeightArgs, WritableBlocks
from swiftlite.bridge.encoding.encoding import WritableEncoding
from swiftlite.bridge.encoding.fp8 import WritableFp8
from swiftlite.errors import UserError

QuantHeads = Literal["keep", "block"]
"""Whether the decoder layers of MTP heads are quantized."""


@dataclass(frozen=True)
class Scheme:
    """A way to store matrices.

    Attributes:
        words: description for logs and model cards.
        config: quantization_config without lists of modules.
        weights: the weights of the only group in config.json; None for FP8 in DeepSeek's format.
        block: rows and columns of a block in DeepSeek's format.
    """

    words: str
    config: Mapping[str, Any]
    weights: WeightArgs | None = None
    block: tuple[int, int] = (0, 0)

    def encoding(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> WritableEncoding:
        """Return the encoding of a matrix.

        Args:
            key: HF key of the matrix, for the error.
            shape: rows and columns.
            dtype: dtype of the matrix before quantization, which the scales get.

        Raises:
            UserError: the matrix does not consist of whole groups.
        """
        rows, columns = shape
        if self.weights is None:
            return WritableFp8.of((rows, columns), self.block)
        try:
            return WritableBlocks.of((rows, columns), self.weights, dtype)
        except ValueError:
            size = self.weights.size
            fitting = [n for n in (128, 64, 32) if columns % n == 0]
            hint = "use --quant_method fp8, or --quant_bits 8"
            if fitting:
                hint = f"use --group_size {fitting[0]}"
            problem = f"--group_size {size}: {key} has {columns} columns, which are not whole groups"
            raise UserError(problem, hint) from None


def scheme_of(args: ExportArgs) -> Scheme:
    """Return the scheme that the options select."""
    if args.quant_method == "fp8" and args.quant_block:
        size = args.quant_block
        config = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [size, size],
        }
        return Scheme(f"fp8, blocks of {size} x {size}", config, block=(size, size))
    if args.quant_method == "fp8":
        return _compressed("fp8, one scale per channel", "float-quantized", _FP8, _FP8_ACTIVATIONS)
    if args.quant_bits == 4:
        weights = _INT4 | {"group_size": args.group_size}
        return _compressed(f"4 bits, groups of {args.group_size}", "pack-quantized", weights, None)
    return _compressed("int8, one scale per channel", "int-quantized", _INT8, _INT8_ACTIVATIONS)


_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "dynamic": False}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
# Engines compute scales of activations for each token.
_INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_FP8_ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def _compressed(words: str, format: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> Scheme:
    """Return a scheme of compressed-tensors with one group for all linear layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    return Scheme(words, config, WeightArgs.from_json(weights))
