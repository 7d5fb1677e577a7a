"""Checkpoints in the formats of AutoGPTQ (GPTQModel) and AutoAWQ.

Both store the transpose of a matrix `X.weight` as int32 words `X.qweight`, with scales `X.scales` and zero points
`X.qzeros` for groups of columns. GPTQ packs consecutive columns of the matrix into a word, AWQ consecutive rows in
another order. `quantization.py` checks config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.encoding.blocks import Blocks, Layout, Packing
from swiftlite.bridge.encoding.encoding import EncodedTensor
from swiftlite.bridge.encoding.stored import check_shapes, dtype_name, is_for_serving, matrix_shape
from swiftlite.bridge.entry import Entry

_SCALES = Layout("scales", is_transposed=True)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class TransposedWords:
    """The `Format` of GPTQ and AWQ.

    Args:
        packing: how codes are packed.
        zero_packing: how zero points are packed.
        group_size: columns with a common scale; -1: all columns.
        zero_point: number that is added to each stored zero point.
        orders_columns: whether `X.g_idx` assigns columns to groups (act-order). Otherwise groups are consecutive, and
            `X.g_idx` is not read.
    """

    packing: Packing
    zero_packing: Packing
    group_size: int
    zero_point: int = 0
    orders_columns: bool = False

    @classmethod
    def declared_gptq(cls, quantization: Mapping[str, Any]) -> "TransposedWords":
        """Create the format from a quantization_config of GPTQ that `quantization.CHECKS` accepts."""
        bits = quantization["bits"]
        # The first version of the format stores zero points less one.
        is_first_version = quantization.get("checkpoint_format") != "gptq_v2"
        return cls(
            Packing(bits, axis=1),
            Packing(bits, axis=0),
            quantization["group_size"],
            zero_point=int(is_first_version),
            orders_columns=bool(quantization.get("desc_act")),
        )

    @classmethod
    def declared_awq(cls, quantization: Mapping[str, Any]) -> "TransposedWords":
        """Create the format from a quantization_config of AWQ that `quantization.CHECKS` accepts."""
        packing = Packing(quantization["bits"], axis=0, places=_AWQ_PLACES)
        return cls(packing, packing, quantization["group_size"])

    def find(self, key: str, entries: Mapping[str, Entry]) -> EncodedTensor | None:
        if not key.endswith(".qweight"):
            return None
        entry = entries[key]
        if entry.dtype is not torch.int32:
            raise UserError(f"{key} is {dtype_name(entry)}; int32 is expected")
        module = key.removesuffix("qweight")
        columns, rows = matrix_shape(key, entry.shape)
        # For a matrix [rows, columns], qweight is [columns / 8, rows] in GPTQ and [columns, rows / 8] in AWQ (4 bits).
        if self.packing.axis == 1:
            columns *= self.packing.per_word
        else:
            rows *= self.packing.per_word
        size = self.group_size
        if size == -1:
            size = columns
        table = f"{module}g_idx" in entries
        encoding = Blocks(
            (rows, columns),
            (1, size),
            Layout("qweight", is_transposed=True, packing=self.packing),
            _SCALES,
            zero_points=Layout("qzeros", is_transposed=True, packing=self.zero_packing),
            zero_point=self.zero_point,
            group_of_column="g_idx" if table and self.orders_columns else None,
            unread=(("g_idx", (columns,)),) if table and not self.orders_columns else (),
        )
        check_shapes(key, encoding, entries)
        dtype = entries[f"{module}scales"].dtype
        return EncodedTensor(f"{module}weight", replace(entry, dtype=dtype, shape=encoding.shape), encoding)

    def is_for_serving(self, key: str) -> bool:
        return is_for_serving(key)
