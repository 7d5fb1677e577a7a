"""Checks of stored tensors that all quantized formats share."""

from collections.abc import Mapping

import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.encoding.blocks import Blocks
from swiftlite.bridge.entry import Entry

_SCALES = (torch.float32, torch.bfloat16, torch.float16)
# Scales and zero points of activations and of the KV cache, which engines use in addition to the weights.
_FOR_SERVING = tuple(
    f".{tensor}_{number}"
    for tensor in ("input", "output", "q", "k", "v", "prob")
    for number in ("scale", "zero_point", "global_scale")
)


def is_for_serving(key: str) -> bool:
    """Return whether a stored tensor belongs to activations or to the KV cache, and not to a weight."""
    return key.endswith(_FOR_SERVING)


def dtype_name(entry: Entry) -> str:
    """Return the name of a tensor's dtype for messages, such as "int8"."""
    return str(entry.dtype).removeprefix("torch.")


def matrix_shape(key: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a stored tensor.

    Raises:
        UserError: the tensor is not a matrix.
    """
    if len(shape) != 2 or 0 in shape:
        raise UserError(f"{key} has shape {list(shape)}; only matrices can be quantized")
    return shape[0], shape[1]


def check_shapes(key: str, encoding: Blocks, entries: Mapping[str, Entry]) -> None:
    """Check that all stored tensors of a matrix exist, and have the shapes and dtypes that the encoding defines.

    Args:
        key: key of the codes.

    Raises:
        UserError: a stored tensor is missing or has another shape or dtype.
    """
    module = key.removesuffix(encoding.codes.ending)
    name = f"{module}weight" if module.endswith(".") else module
    for ending, shape in encoding.shapes().items():
        entry = entries.get(module + ending)
        if entry is None:
            raise UserError(f"{key} is {dtype_name(entries[key])} without {module}{ending}")
        # Scales that are relative to a factor are float8 codes themselves.
        is_scale = ending == encoding.scales.ending and encoding.factor is None
        dtypes = _SCALES if encoding.exponent_bias is None else (torch.uint8,)
        if entry.shape != shape or (is_scale and entry.dtype not in dtypes):
            found = f"{module}{ending} is {dtype_name(entry)} {list(entry.shape)}"
            blocks = f"the blocks {list(encoding.block)} of {name} {list(encoding.shape)}"
            raise UserError(f"{found}; it does not match {blocks}, for which {list(shape)} is expected")
