"""FP8 checkpoints in DeepSeek-V3's format: `X.weight` in float8_e4m3fn, `X.weight_scale_inv` with a factor for each
block of it. Factors are float32 in DeepSeek-V3, bfloat16 in Qwen3-FP8. They are read as the numbers they stand for;
what swiftlite writes is bfloat16. Which config.json promises such a checkpoint is in `quantization.py`.
"""

from collections.abc import Mapping

import torch

from swiftlite.bridge.encoding.quantization import BlockSize
from swiftlite.bridge.entry import Entry

SCALE_SUFFIX = "_scale_inv"
_FACTORS = (torch.float32, torch.bfloat16, torch.float16)


def is_quantised(key: str, entries: Mapping[str, Entry]) -> bool:
    """Whether a tensor comes with factors."""
    return entries[key].dtype is torch.float8_e4m3fn and key + SCALE_SUFFIX in entries


def scales_of(entries: Mapping[str, Entry], block: BlockSize) -> tuple[dict[str, Entry], list[str]]:
    """The factors of every quantised tensor, by the tensor's key; and one line for each that cannot be used."""
    scales, problems = {}, []
    for key, entry in entries.items():
        if entry.dtype is not torch.float8_e4m3fn:
            continue
        scale_key = key + SCALE_SUFFIX
        scale = entries.get(scale_key)
        if scale is None:
            problems.append(f"{key} is {entry.dtype} without {scale_key}")
        elif scale.dtype not in _FACTORS or len(entry.shape) != 2 or scale.shape != _num_blocks(entry.shape, block):
            found = f"{scale_key} is {scale.dtype} {list(scale.shape)}"
            problems.append(f"{found}, not factors of the {list(block)} blocks of {key} {list(entry.shape)}")
        else:
            scales[key] = scale
    return scales, problems


def blocks_of(ranges: tuple[range, range], block: BlockSize) -> tuple[range, range]:
    """The blocks that a box of a tensor touches."""
    rows, columns = (range(r.start // n, (r.stop - 1) // n + 1) for r, n in zip(ranges, block, strict=True))
    return rows, columns


def dequantise(chunk: torch.Tensor, scale: torch.Tensor, ranges: tuple[range, range], block: BlockSize) -> torch.Tensor:
    """The float32 numbers that a box of a tensor stands for.

    Args:
        chunk: the box, float8.
        scale: the factors of `blocks_of(ranges, block)`.
        ranges: which rows and columns of the tensor the box is.
    """
    rows, columns = (torch.arange(r.start, r.stop) // n - r.start // n for r, n in zip(ranges, block, strict=True))
    return chunk.float() * scale.float()[rows][:, columns]


def _num_blocks(shape: tuple[int, ...], block: BlockSize) -> tuple[int, ...]:
    return tuple(-(-length // n) for length, n in zip(shape, block, strict=True))
