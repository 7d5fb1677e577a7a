"""Checkpoints with experts in MXFP4, as OpenAI published gpt-oss.

The matrix `X` of an expert is stored as codes `X_blocks`, two numbers of 4 bits (e2m1) in a byte, and one scale in
`X_scales` for each 32 columns. Scales are powers of two: a byte is the exponent plus 127 (e8m0). `expert_stack.py`
finds the single experts in stacks. `quantization.py` checks config.json.
"""

from collections.abc import Mapping
from typing import Any

import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.encoding.blocks import FP4_VALUES, Blocks, Layout, Packing
from swiftlite.bridge.encoding.encoding import EncodedTensor
from swiftlite.bridge.encoding.stored import check_shapes, dtype_name, matrix_shape
from swiftlite.bridge.entry import Entry

GROUP = 32
"""Columns with a common scale."""
_CODES, _SCALES = "_blocks", "_scales"
_EXPONENT_BIAS = 127


class Mxfp4:
    """The `Format` of MXFP4."""

    @classmethod
    def declared(cls, quantization: Mapping[str, Any]) -> "Mxfp4":
        """Create the format from a quantization_config that `quantization.CHECKS` accepts."""
        return cls()

    def find(self, key: str, entries: Mapping[str, Entry]) -> EncodedTensor | None:
        if not key.endswith(_CODES):
            return None
        entry = entries[key]
        if entry.dtype is not torch.uint8:
            raise UserError(f"{key} is {dtype_name(entry)}; uint8 is expected")
        rows, num_bytes = matrix_shape(key, entry.shape)
        packing = Packing(4, axis=1, word=torch.uint8)
        shape = (rows, num_bytes * packing.per_word)
        encoding = Blocks(
            shape,
            (1, GROUP),
            Layout(_CODES, packing=packing),
            Layout(_SCALES),
            dtype=torch.float32,
            values=FP4_VALUES,
            exponent_bias=_EXPONENT_BIAS,
        )
        check_shapes(key, encoding, entries)
        name = key.removesuffix(_CODES)
        decoded = Entry(torch.bfloat16, shape, entry.file, entry.offset)
        return EncodedTensor(name, decoded, encoding)

    def is_for_serving(self, key: str) -> bool:
        return False
