"""Read FP8 checkpoints in the format of DeepSeek-V3.

A matrix is stored as `X.weight` in float8_e4m3fn and `X.weight_scale_inv` with one scale per block. Scales are float32
in DeepSeek-V3 and bfloat16 in Qwen3-FP8. Tensors are dequantized while they are read; swiftlite writes bfloat16.
`quantization.py` checks config.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swiftlite.bridge.entry import Box, Entry
from swiftlite.errors import UserError

_SCALE_SUFFIX = "_scale_inv"
_FACTORS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Fp8Blocks:
    """FP8 codes with one scale per block, as a `DeclaredEncoding`.

    Args:
        block: rows and columns of a block; blocks at the end of a tensor can be smaller.
    """

    block: tuple[int, int]

    @classmethod
    def declared(cls, quantization: Mapping[str, Any]) -> "Fp8Blocks":
        """Create the encoding from a quantization_config that `quantization.CHECKS` accepts."""
        rows, columns = quantization["weight_block_size"]
        return cls((rows, columns))

    def find(self, key: str, entries: Mapping[str, Entry]) -> tuple[str, Entry] | None:
        entry = entries[key]
        if entry.dtype is not torch.float8_e4m3fn:
            return None
        scale_key = key + _SCALE_SUFFIX
        scale = entries.get(scale_key)
        if scale is None:
            raise UserError(f"{key} is {entry.dtype} without {scale_key}")
        num_blocks = tuple(-(-length // n) for length, n in zip(entry.shape, self.block, strict=False))
        if scale.dtype not in _FACTORS or len(entry.shape) != 2 or scale.shape != num_blocks:
            found = f"{scale_key} is {scale.dtype} {list(scale.shape)}"
            raise UserError(f"{found}; it does not match the {list(self.block)} blocks of {key} {list(entry.shape)}")
        return key, entry

    def entries(self, name: str) -> tuple[str, ...]:
        return name, name + _SCALE_SUFFIX

    def boxes(self, box: Box) -> tuple[Box, ...]:
        rows, columns = (range(r.start // n, (r.stop - 1) // n + 1) for r, n in zip(box, self.block, strict=True))
        return box, (rows, columns)

    def read(self, parts: Sequence[torch.Tensor], box: Box) -> torch.Tensor:
        codes, scale = parts
        rows, columns = (
            torch.arange(r.start, r.stop) // n - r.start // n for r, n in zip(box, self.block, strict=True)
        )
        return codes.float() * scale.float()[rows][:, columns]
