"""Quantization schemes of `export --quant_method`: what config.json declares, and how a matrix is stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.bridge.encoding.compressed_tensors import WeightArgs, WritableBlocks, WritableFp4
from swiftlite.bridge.encoding.encoding import WritableEncoding
from swiftlite.bridge.encoding.fp8 import WritableFp8
from swiftlite.plan.quantization import quant_bits_of

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

    @property
    def group(self) -> Mapping[str, Any]:
        """The settings of compressed-tensors for all quantized modules."""
        return self.config["config_groups"]["group_0"]

    @property
    def has_global_scales(self) -> bool:
        """Whether a matrix also has one scale in float32, which depends on the largest value (NVFP4)."""
        return self.weights is not None and self.weights.strategy == "tensor_group"

    def encoding(self, shape: tuple[int, ...], dtype: torch.dtype, largest: float = 1.0) -> WritableEncoding:
        """Return the encoding of a matrix.

        Args:
            shape: rows and columns.
            dtype: dtype of the matrix before quantization, which the scales get.
            largest: if `has_global_scales`, the largest absolute value of the matrices that have a common global scale.
        """
        rows, columns = shape
        if self.weights is None:
            return WritableFp8.of((rows, columns), self.block)
        if self.has_global_scales:
            return WritableFp4.of((rows, columns), self.weights.size, largest)
        return WritableBlocks.of((rows, columns), self.weights, dtype)


def scheme_of(args: ExportArgs, shapes: Mapping[str, tuple[int, ...]]) -> Scheme:
    """Return the scheme that the options select.

    Args:
        shapes: shapes of the matrices, by key.

    Raises:
        UserError: a matrix does not consist of whole groups.
    """
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
    if args.quant_method == "nvfp4":
        _check_groups(_NVFP4["group_size"], shapes, "--quant_method nvfp4", _WITHOUT_GROUPS)
        return _compressed("nvfp4, groups of 16", "nvfp4-pack-quantized", _NVFP4, None)
    if quant_bits_of(args) == 4:
        size = _group_size(args.group_size, shapes)
        words = f"{args.quant_method}, 4 bits, groups of {size}"
        return _compressed(words, "pack-quantized", _INT4 | {"group_size": size}, None)
    words = f"{args.quant_method}, 8 bits, one scale per channel"
    return _compressed(words, "int-quantized", _INT8, _INT8_ACTIVATIONS)


def _group_size(given: int | None, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return --group_size, or by default the largest common size that divides the columns of all matrices.

    Raises:
        UserError: a matrix does not consist of whole groups.
    """

    def unfit(size: int) -> str | None:
        return next((key for key, shape in shapes.items() if shape[1] % size), None)

    fitting = [size for size in _GROUP_SIZES if unfit(size) is None]
    if given is None and fitting:
        if fitting[0] != _GROUP_SIZES[0]:
            key = unfit(_GROUP_SIZES[0])
            columns = shapes[str(key)][1]
            logger.info("--group_size %d: 128 does not divide the %d columns of %s", fitting[0], columns, key)
        return fitting[0]
    hint = _WITHOUT_GROUPS
    if fitting:
        hint = f"use --group_size {fitting[0]}"
    size = given or _GROUP_SIZES[-1]
    _check_groups(size, shapes, f"--group_size {size}", hint)
    return size


def _check_groups(size: int, shapes: Mapping[str, tuple[int, ...]], flag: str, hint: str) -> None:
    """Check that all matrices consist of whole groups of columns.

    Raises:
        UserError: a matrix does not.
    """
    for key, (_, columns) in shapes.items():
        if columns % size:
            raise UserError(f"{flag}: {key} has {columns} columns, which are not whole groups of {size}", hint)


_GROUP_SIZES = (128, 64, 32)  # supported by GPU kernels of engines
_WITHOUT_GROUPS = "use --quant_method fp8, or --quant_method rtn --quant_bits 8"
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "dynamic": False}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
_NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
    "zp_dtype": "torch.float8_e4m3fn",
}
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
