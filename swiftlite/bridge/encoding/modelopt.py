"""Checkpoints in the formats of NVIDIA's ModelOpt (unified Hugging Face checkpoints).

The stored tensors of a matrix `X.weight` show its format, so that a checkpoint can have several of them:

    FP8, FP8_PER_CHANNEL_PER_TOKEN  codes `X.weight` in float8_e4m3fn, `X.weight_scale` in float32: one number, or one
                                    per row
    FP8_PB_WO                       the same with one scale per 128 x 128 numbers
    MXFP8                           the same with one scale per 32 columns, an exponent of two in uint8
    NVFP4, W4A16_NVFP4              codes `X.weight`, two FP4 numbers per byte, `X.weight_scale` in float8_e4m3fn with
                                    one number per 16 columns, and `X.weight_scale_2`, by which scales are multiplied

`quantization.py` checks config.json. AWQ and SVDQuant have further tensors for the inputs of a layer and are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.encoding.blocks import FP4_VALUES, Blocks, Layout, Packing
from swiftlite.bridge.encoding.encoding import EncodedTensor
from swiftlite.bridge.encoding.stored import check_shapes, dtype_name, is_for_serving, matrix_shape
from swiftlite.bridge.entry import Entry

BLOCK = 128
"""Rows and columns with a common scale in FP8_PB_WO."""
GROUP = 32
"""Columns with a common scale in MXFP8."""
FP4_GROUP = 16
"""Columns with a common scale in NVFP4."""
EXPONENT_BIAS = 127
_SCALE, _FACTOR = "weight_scale", "weight_scale_2"
_OF_INPUTS = ("pre_quant_scale", "svdquant_lora_a")
"""Tensors of methods that also change the inputs of a layer."""


@dataclass(frozen=True)
class ModelOpt:
    """The `Format` of ModelOpt."""

    @classmethod
    def declared(cls, quantization: Mapping[str, Any]) -> "ModelOpt":
        """Create the format from a quantization_config that `quantization.CHECKS` accepts."""
        return cls()

    def find(self, key: str, entries: Mapping[str, Entry]) -> EncodedTensor | None:
        entry = entries[key]
        module = key.removesuffix("weight")
        if module == key or entry.dtype not in (torch.float8_e4m3fn, torch.uint8, torch.int8):
            return None
        for ending in _OF_INPUTS:
            if module + ending in entries:
                raise UserError(f"{key} is quantized by a method that is not supported: {module}{ending} exists")
        scale = entries.get(module + _SCALE)
        if entry.dtype is torch.int8:
            raise UserError(f"{key} is int8; of ModelOpt's formats, only those with FP8 and FP4 are supported")
        if scale is None:
            raise UserError(f"{key} is {dtype_name(entry)} without {module}{_SCALE}")
        shape = matrix_shape(key, entry.shape)
        # A byte has two numbers, so the matrix is twice as wide as its codes.
        if entry.dtype is torch.uint8:
            encoding = _nvfp4((shape[0], 2 * shape[1]), factor_axes=_num_axes(entries, module + _FACTOR))
        else:
            encoding = _fp8(shape, scale)
        check_shapes(key, encoding, entries)
        # The files do not state the dtype before the quantization.
        return EncodedTensor(key, replace(entry, dtype=torch.bfloat16, shape=encoding.shape), encoding)

    def is_for_serving(self, key: str) -> bool:
        return is_for_serving(key)


def _num_axes(entries: Mapping[str, Entry], key: str) -> int:
    """Return the number of axes of a stored tensor; 0 if it is missing."""
    entry = entries.get(key)
    return 0 if entry is None else len(entry.shape)


def _nvfp4(shape: tuple[int, int], factor_axes: int) -> Blocks:
    """Return the encoding of a matrix in FP4 with scales relative to one number."""
    return Blocks(
        shape,
        (1, FP4_GROUP),
        Layout("weight", packing=Packing(4, axis=1, word=torch.uint8)),
        Layout(_SCALE),
        factor=(_FACTOR, factor_axes),
        multiplies=True,
        dtype=torch.float32,
        values=FP4_VALUES,
    )


def _fp8(shape: tuple[int, int], scale: Entry) -> Blocks:
    """Return the encoding of a matrix in FP8; the scale shows the size of the blocks."""
    axes = len(scale.shape)
    block = shape
    # Before the number of axes, because scales of MXFP8 have two axes as well.
    if scale.dtype is torch.uint8:
        block = (1, GROUP)
    elif axes in (2, 4):
        block = (BLOCK, BLOCK)
    elif scale.shape == (shape[0],):
        block = (1, shape[1])
    encoding = Blocks(shape, block, Layout("weight"), Layout(_SCALE, axes=axes), dtype=torch.float32)
    if scale.dtype is torch.uint8:
        return replace(encoding, exponent_bias=EXPONENT_BIAS)
    return encoding
