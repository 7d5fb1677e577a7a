"""FP8 checkpoints in the format of DeepSeek-V3, and those with one scale per matrix.

A matrix is stored as `X.weight` in float8_e4m3fn and `X.weight_scale_inv` with one scale per block. Scales are float32
in DeepSeek-V3 and bfloat16 in Qwen3-FP8. Without blocks, `X.weight_scale` is the single scale of the matrix.
`quantization.py` checks config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.encoding.blocks import LARGEST_FP8, Blocks, Layout
from swiftlite.bridge.encoding.encoding import EncodedTensor
from swiftlite.bridge.encoding.stored import check_shapes, dtype_name, is_for_serving, matrix_shape
from swiftlite.bridge.entry import Entry

_SCALES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True)
class Fp8:
    """The `Format` of FP8 codes with one scale per block, or per matrix.

    Args:
        block: rows and columns of a block; blocks at the end of a tensor can be smaller. None: the whole matrix.
    """

    block: tuple[int, int] | None

    @classmethod
    def declared(cls, quantization: Mapping[str, Any]) -> "Fp8":
        """Create the format from a quantization_config that `quantization.CHECKS` accepts."""
        block = quantization.get("weight_block_size")
        return cls(block and (block[0], block[1]))

    def find(self, key: str, entries: Mapping[str, Entry]) -> EncodedTensor | None:
        entry = entries[key]
        if entry.dtype is not torch.float8_e4m3fn or key.endswith(_SCALES):  # scales are checked with their codes
            return None
        module = key.removesuffix("weight")
        ending = next((ending for ending in _SCALES if module + ending in entries), None)
        if module == key or ending is None:
            raise UserError(f"{key} is {dtype_name(entry)} without {module}{_SCALES[0]}")
        shape = matrix_shape(key, entry.shape)
        axes = 2
        if self.block is None:
            axes = len(entries[module + ending].shape)
        encoding = Blocks(shape, self.block or shape, Layout("weight"), Layout(ending, axes=axes), dtype=torch.float32)
        check_shapes(key, encoding, entries)
        return EncodedTensor(key, entry, encoding)

    def is_for_serving(self, key: str) -> bool:
        return is_for_serving(key)


@dataclass(frozen=True)
class WritableFp8(Blocks):
    """FP8 codes with one scale per block, as a `WritableEncoding` in the format of DeepSeek-V3.

    Codes are computed with the stored scale, so the error is at most half a step.

    Args:
        scale_dtype: dtype of the stored scales.
        rounds_scales_up: whether scales are powers of two (`scale_fmt` "ue8m0").
    """

    scale_dtype: torch.dtype = torch.float32
    rounds_scales_up: bool = False

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        block: tuple[int, int],
        scale_dtype: torch.dtype = torch.float32,
        rounds_scales_up: bool = False,
    ) -> "WritableFp8":
        base = Blocks(shape, block, Layout("weight"), Layout("weight_scale_inv"), dtype=torch.float32)
        return cls(**vars(base), scale_dtype=scale_dtype, rounds_scales_up=rounds_scales_up)

    def write(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, columns = self.block
        height, width = tensor.shape
        padding = (0, -width % columns, 0, -height % rows)
        blocks = torch.nn.functional.pad(tensor.float(), padding).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scales = blocks.abs().amax(dim=(1, 3)) / LARGEST_FP8
        if self.rounds_scales_up:
            mantissa, exponent = torch.frexp(scales)  # a power of two has the mantissa 0.5
            scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
        # Rounded before codes are computed, because a reader multiplies with the rounded scale.
        scales = scales.to(self.scale_dtype)
        # For blocks of zeros, whose codes would be 0 / 0.
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        codes = blocks / scales.float()[:, None, :, None]
        codes = codes.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
        return codes.flatten(0, 1).flatten(1, 2)[:height, :width], scales
